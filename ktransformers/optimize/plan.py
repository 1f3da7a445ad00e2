"""Makes the plan of module tree, rules and headers of the weight files: which operator goes where, and what it will
hold.

Pure: reads no weight byte, changes neither model nor machine. The same plan is printed, checked against the memory
that there is, and applied.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import nn

from ktransformers.core import Phase, format_bytes
from ktransformers.errors import CapacityError, ConfigError, RuleError, TensorMismatchError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.base import Operator, OperatorConfig, Placement, Requirements
from ktransformers.operators.device import Devices
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.partial_sums import Placeholder
from ktransformers.operators.wrapper import DenseState
from ktransformers.optimize.file_tensors import check_tensors
from ktransformers.optimize.layer_devices import LayerDevice, LayerDevices
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.rules import Rule, Rules
from ktransformers.optimize.tied import TiedSource, tied_names
from ktransformers.optimize.unmatched import UnmatchedRule, report_unmatched
from ktransformers.system.shipped_rules import is_shipped
from ktransformers.weights.source import WeightSource

__all__ = ["Choices", "Plan", "PlanEntry", "format_bytes", "make_plan"]

logger = logging.getLogger(__name__)

KEPT_OP = "torch"


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Plan of one module: its operator, placement and bytes.

    key: dotted name; the root is "". operator: class name, None when the module is kept. generate_op and prefill_op:
    what runs in each phase. nbytes: resident bytes per device of the module itself, children excluded. rule: number
    of the rule that decided, in its file, None when none did; rule_place: FILE:LINE of a rule in an included file, else
    "". stored_names: tensors in the files that it reads. looked_up, in_files: of tables of which a token reads a few
    rows; stored_experts: of experts that stay in files: see Requirements.
    """

    key: str
    hf_class: str
    operator: str | None
    placement: Placement
    generate_op: str
    prefill_op: str
    rule: int | None
    quant_types: tuple[str, ...] = ()
    nbytes: Mapping[str, int] = field(default_factory=dict)
    stored_names: frozenset[str] = frozenset()
    note: str = ""
    rule_place: str = ""
    looked_up: Mapping[str, int] = field(default_factory=dict)
    in_files: int = 0
    stored_experts: int = 0

    @property
    def is_kept(self) -> bool:
        """Whether the module is kept, without an operator in its place."""
        return self.operator is None

    @property
    def total_bytes(self) -> int:
        """Resident bytes of the module over all devices."""
        return sum(self.nbytes.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """Placements of every module of a model in tree order, and what the whole needs.

    operators: the operators built for planning, by key; `apply_plan` puts these very objects into the model.
    kept: modules with parameters or persistent buffers that stay, by key. extra_bytes: bytes besides weights, as
    {what: {device: bytes}} ("kv cache"). tied: {tensor name: name it is tied to}. shared: {module: module whose
    memory it uses}, counted once. layer_devices: where the decoder layers live, in order. devices: what the names mean.
    slots: of experts modules on the CPU of which some experts have a slot on a GPU: that device, and their share.
    fallbacks: modules on the CPU for which a rule names a GPU.
    """

    model_type: str
    rule_file: str
    machine: Machine
    entries: tuple[PlanEntry, ...]
    operators: Mapping[str, Operator]
    kept: Mapping[str, nn.Module]
    unmatched: tuple[UnmatchedRule, ...]
    tied: Mapping[str, str]
    shared: Mapping[str, str]
    extra_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    layer_devices: tuple[LayerDevice, ...] = ()
    devices: Devices = field(default_factory=Devices)
    slots: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    fallbacks: tuple[str, ...] = ()

    def report_fallback(self) -> None:
        """Log that there is no GPU for modules that rules place on one, if there are any."""
        if self.fallbacks:
            logger.info(
                "%s places %d modules on cuda; there is no CUDA device that this version uses, they run on the CPU",
                _name_of(self.rule_file),
                len(self.fallbacks),
            )

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Resident bytes of weights per device."""
        return _sum_by_device(entry.nbytes for entry in self.entries)

    @property
    def stored_experts(self) -> int:
        """Bytes of experts that stay in files."""
        return sum(entry.stored_experts for entry in self.entries)

    @property
    def total_bytes(self) -> dict[str, int]:
        """Bytes per device, extra_bytes included; devices of the machine that hold nothing are listed with 0."""
        empty = dict.fromkeys(self.machine.devices, 0)
        return _sum_by_device([empty, self.weight_bytes, *self.extra_bytes.values()])

    def with_extra(self, what: str, nbytes: Mapping[str, int]) -> Plan:
        """Return the plan with bytes of something else, by device, besides what it holds."""
        return replace(self, extra_bytes={**self.extra_bytes, what: nbytes})

    @property
    def gpu_bytes(self) -> int:
        """Bytes of total_bytes that the GPUs hold."""
        return sum(nbytes for device, nbytes in self.total_bytes.items() if device != "cpu")

    @property
    def capacity(self) -> Mapping[str, int]:
        """Free bytes of the machine per device."""
        return self.machine.devices

    def device_of(self, key: str) -> str:
        """Return the device on which the module of this name runs."""
        return next(entry.placement.generate_device for entry in self.entries if entry.key == key)

    def misfit(self) -> str | None:
        """Return why the plan does not fit into this machine, or None when it fits."""
        total = self.total_bytes
        short = [device for device in total if total[device] > self.capacity.get(device, 0)]
        if not short:
            return None
        lines = ["the model does not fit into this machine:"]
        for device in short:
            parts = {"weights": self.weight_bytes.get(device, 0)}
            parts.update({what: nbytes.get(device, 0) for what, nbytes in self.extra_bytes.items()})
            shown = " + ".join(f"{what} {format_bytes(nbytes)}" for what, nbytes in parts.items() if nbytes)
            free = self.capacity.get(device, 0)
            lines.append(f"  {device}: {shown} = {format_bytes(total[device])}, but {format_bytes(free)} are free")
        lines.append("  use a smaller quantization (a smaller GGUF, --cpu_quant) or a shorter cache (--cache_lens)")
        if any(device != "cpu" for device in short):
            lines.append("  or place fewer modules on the GPU (--optimize_config_path, --gpu_memory)")
        return "\n".join(lines)

    def check_fits(self) -> None:
        """Raise CapacityError, with what is needed and what there is, when a device cannot hold its part."""
        reason = self.misfit()
        if reason is not None:
            raise CapacityError(reason)


@dataclass(frozen=True, slots=True)
class Choices:
    """Decisions beside the rules that a plan depends on.

    moved: {module: device} where operators go whatever their rule says (see optimize/fill). transfer: {first layer:
    device} where no rule has a transfer_map (see optimize/layer_devices).
    """

    moved: Mapping[str, str] = field(default_factory=dict)
    transfer: Mapping[int, str] = field(default_factory=dict)


def make_plan(
    model: nn.Module,
    rules: Rules,
    *,
    operator_config: OperatorConfig,
    source: WeightSource,
    machine: Machine,
    strict: bool = False,
    ignorable: Callable[[str], bool] | None = None,
    choices: Choices | None = None,
) -> Plan:
    """Decide for every module of `model` (a `transformers` model on meta, unchanged afterwards).

    ignorable recognizes stored tensors that may be left unread; by default the source knows. The plan has no
    extra_bytes. A rule that decides nothing is a logged warning; with strict, an error. Raises RuleError,
    UnsupportedError, and TensorMismatchError naming tensors that are missing, left over or of the wrong shape.
    """
    choices = choices or Choices()
    model_type = operator_config.facts.model_type
    layer_devices = LayerDevices(model, model_type, rules, machine, choices.transfer)
    planner = _Planner(model, rules, operator_config, source, machine, choices.moved, layer_devices)
    planner.visit(model, "", None)
    unmatched = report_unmatched(model, model_type, rules, planner.decided, strict)
    shared = _shared_modules(planner.entries, planner.tied)
    entries = _count_once(planner.entries, shared)
    used = frozenset[str]().union(*(entry.stored_names for entry in entries))
    left = [name for name in source.stored_names() if name not in used and not (ignorable or source.ignorable)(name)]
    check_tensors(planner.problems, left, operator_config.facts)
    return Plan(
        model_type=model_type,
        rule_file=rules.file,
        machine=machine,
        entries=tuple(entries),
        operators=planner.operators,
        kept=planner.kept,
        unmatched=unmatched,
        tied=planner.tied,
        shared=shared,
        layer_devices=tuple(planner.layer_devices.layers.values()),
        devices=operator_config.devices,
        fallbacks=tuple(planner.fallbacks),
    )


class _Planner:
    """The walk over the tree."""

    def __init__(
        self,
        model: nn.Module,
        rules: Rules,
        config: OperatorConfig,
        source: WeightSource,
        machine: Machine,
        moved: Mapping[str, str],
        layer_devices: LayerDevices,
    ):
        self.moved, self.layer_devices = moved, layer_devices
        self.rules, self.config, self.machine = rules, config, machine
        self.model_type = config.facts.model_type
        self.tied = tied_names(model)
        self.source: WeightSource = TiedSource(source, self.tied)
        self.entries: list[PlanEntry] = []
        self.decided: dict[str, Rule | None] = {}
        self.operators: dict[str, Operator] = {}
        self.kept: dict[str, nn.Module] = {}
        self.problems: list[str] = []
        self._seen: dict[int, str] = {}
        self.fallbacks: list[str] = []

    def visit(self, module: nn.Module, key: str, closed: Rule | None) -> None:
        """Plan `module` and its children. closed: the rule above that said `recursive: false`, if any did."""
        if self._is_repeated(module, key):
            return
        rule = closed or self.rules.first_match(key, module, self.model_type)
        self.decided[key] = rule
        owned: frozenset[str] = frozenset()
        if isinstance(module, Placeholder):
            rule = self.decided[key] = closed
            self._keep(module, key, rule)
        elif rule is not None and rule.operator is not None and closed is None:
            owned = self._replace(module, key, rule)
        else:
            self._keep(module, key, rule)
        if rule is not None and not rule.recursive:
            closed = rule
        for name, child in module.named_children():
            if name not in owned:
                self.visit(child, f"{key}.{name}" if key else name, closed)

    def _is_repeated(self, module: nn.Module, key: str) -> bool:
        first = self._seen.setdefault(id(module), key)
        if first == key:
            return False
        if any(True for _ in module.parameters()):
            raise UnsupportedError(f"{first} and {key} are one module ({type(module).__name__}); that is not supported")
        return True

    def _replace(self, module: nn.Module, key: str, rule: Rule) -> frozenset[str]:
        """Build the rule's operator for `module`; returns the children that it loads itself."""
        assert rule.operator is not None
        if not key:
            raise rule.error("matches the whole model; only the modules inside it can be replaced")
        placement = self._placement(rule, key)
        self._note_fallback(rule, key, placement)
        try:
            operator = rule.operator(module, key, self.config, placement, **rule.kwargs)
        except (ConfigError, TypeError) as error:
            raise rule.error(f"{rule.operator.__name__} at {key}: {error}") from error
        self._place(operator, module, key, rule, placement)
        return operator.owned_children()

    def _place(
        self,
        operator: Operator,
        module: nn.Module,
        key: str,
        rule: Rule | None,
        placement: Placement,
        note: str = "",
    ) -> None:
        """Note what stands in for `module`."""
        self.operators[key] = operator
        entry = PlanEntry(
            key=key,
            hf_class=type(module).__name__,
            operator=type(operator).__name__,
            placement=placement,
            generate_op=operator.op(Phase.GENERATE),
            prefill_op=operator.op(Phase.PREFILL),
            rule=None if rule is None else rule.number,
            rule_place=_included_place(rule),
            note=note,
        )
        self.entries.append(self._with_needs(entry, lambda: operator.requirements(self.source)))

    def _keep(self, module: nn.Module, key: str, rule: Rule | None) -> None:
        """Plan `module` as it is: its own parameters and persistent buffers dense, a plain linear layer in the file's
        type."""
        placement = self._placement(rule, key)
        if self._is_narrow_linear(module, key):
            self._keep_bits(module, key, rule, Placement.on(placement.generate_device, placement.layer_device))
            return
        state = DenseState(module, key, self.config.devices[placement.generate_device])
        if any(len(shape) == 3 and name.endswith("down_proj") for name, shape in state.names()):
            raise self._kept_experts(module, key, rule)
        if state.names():
            self.kept[key] = module
            self._note_fallback(rule, key, placement)
        entry = PlanEntry(
            key=key,
            hf_class=type(module).__name__,
            operator=None,
            placement=placement,
            generate_op=KEPT_OP,
            prefill_op=KEPT_OP,
            rule=None if rule is None else rule.number,
            rule_place=_included_place(rule),
        )
        self.entries.append(self._with_needs(entry, lambda: state.requirements(self.source)))

    def _is_narrow_linear(self, module: nn.Module, key: str) -> bool:
        """Whether `module` is a plain linear layer whose stored weight fp32 would blow up, and its own."""
        if type(module).forward is not nn.Linear.forward or f"{key}.weight" in self.tied:
            return False
        info = self.source.find(f"{key}.weight")
        return info is not None and info.resident_type is not QuantType.F32

    def _keep_bits(self, module: nn.Module, key: str, rule: Rule | None, placement: Placement) -> None:
        operator = KTransformersLinear(module, key, self.config, placement)
        self._note_fallback(rule, key, placement)
        self._place(operator, module, key, rule, placement, "left alone, in the file's type")

    def _kept_experts(self, module: nn.Module, key: str, rule: Rule | None) -> RuleError:
        """Why the routed experts `key` stay, though they cannot; the rule that decided is named."""
        if rule is None:
            message = f"no rule replaces the routed experts {key}; add one with class KTransformersExperts for it"
            return RuleError(message, file=self.rules.file)
        wanted = (one for one in self.rules.rules if one.operator and one.matches(key, module, self.model_type))
        hidden = next(wanted, None)
        if hidden is None:
            advice = "they cannot stay; add a rule with class KTransformersExperts for them above it"
        else:
            advice = f"it hides {hidden.seen_from(rule)}, which replaces them: move that one above it"
        return rule.error(f"keeps the routed experts {key} ({rule.describe()}); {advice}")

    def _with_needs(self, entry: PlanEntry, ask: Callable[[], Requirements]) -> PlanEntry:
        """`entry` with its bytes; a tensor that does not fit is noted, so that all are reported together."""
        try:
            needs = ask()
        except TensorMismatchError as error:
            self.problems.append(str(error))
            return entry
        return replace(
            entry,
            quant_types=tuple(needs.quant_types),
            nbytes=dict(needs.nbytes),
            stored_names=frozenset(needs.stored_names),
            looked_up=dict(needs.looked_up),
            in_files=needs.in_files,
            stored_experts=needs.stored_experts,
        )

    def _placement(self, rule: Rule | None, key: str) -> Placement:
        """The rule's devices on this machine. A missing prefill or out device is the generate device."""
        layer_device = self.layer_devices.of(key)
        if rule is None:
            return Placement.on(self.layer_devices.default_device(key), layer_device)
        if key in self.moved:
            return Placement.on(self.moved[key], layer_device)
        wanted = self._wanted(rule, key)
        devices = [self._device(device, rule, key) for device in wanted]
        return Placement(
            generate_device=devices[0],
            prefill_device=devices[1],
            out_device=devices[2],
            generate_op=rule.ops.get("generate_op"),
            prefill_op=rule.ops.get("prefill_op"),
            layer_device=layer_device,
        )

    def _wanted(self, rule: Rule, key: str) -> tuple[str, str, str]:
        named = rule.devices
        generate = named.get("generate_device", named.get("prefill_device", self.layer_devices.default_device(key)))
        is_on_layer_device = rule.operator is not None and rule.operator.PREFILLS_ON_LAYER_DEVICE
        prefill = self.layer_devices.default_device(key) if is_on_layer_device else generate
        return generate, named.get("prefill_device", prefill), named.get("out_device", generate)

    def _device(self, named: str, rule: Rule, key: str) -> str:
        device = self.layer_devices.resolve(named, key)
        if device in self.machine.devices:
            return device
        raise rule.error(f"there is no {named} here; this machine has {', '.join(self.machine.devices)}")

    def _note_fallback(self, rule: Rule | None, key: str, placement: Placement) -> None:
        is_on_cpu = {placement.generate_device, placement.prefill_device, placement.out_device} == {"cpu"}
        if rule is not None and is_on_cpu and set(self._wanted(rule, key)) != {"cpu"}:
            self.fallbacks.append(key)


def _name_of(file: str) -> str:
    """A rule file of this program by its name alone: where it is installed is nothing that a reader can use."""
    return Path(file).name if is_shipped(Path(file)) else file


def _included_place(rule: Rule | None) -> str:
    """FILE:LINE of a rule in an included file, "" for others."""
    return "" if rule is None or rule.source.parent is None else rule.place


def _shared_modules(entries: list[PlanEntry], tied: Mapping[str, str]) -> dict[str, str]:
    """{tied module: module whose memory it uses}.

    Operators share when both read the file's own bytes in place; a transcoded copy ("Q3_K>Q6_K") is made per reader.
    Kept modules share the parameter. A mix of the two shares nothing.
    """
    by_key = {entry.key: entry for entry in entries}
    shared: dict[str, str] = {}
    for name, target in tied.items():
        entry, owner = by_key.get(name.rpartition(".")[0]), by_key.get(target.rpartition(".")[0])
        if entry is None or owner is None or not entry.stored_names >= owner.stored_names:
            continue
        is_in_place = all(">" not in kind for kind in entry.quant_types)
        device = entry.placement.generate_device  # operators on a GPU lay out their own copy
        is_in_place &= device == owner.placement.generate_device and (entry.is_kept or device == "cpu")
        if entry.is_kept == owner.is_kept and entry.quant_types == owner.quant_types and is_in_place:
            shared[entry.key] = owner.key
    return shared


def _count_once(entries: Iterable[PlanEntry], shared: Mapping[str, str]) -> list[PlanEntry]:
    """Take off a tied module's bytes what it shares; a bias of its own still counts."""
    entries = list(entries)
    by_key = {entry.key: entry for entry in entries}
    result = []
    for entry in entries:
        if entry.key in shared:
            owner = by_key[shared[entry.key]]
            own = {device: n - owner.nbytes.get(device, 0) for device, n in entry.nbytes.items()}
            own = {device: n for device, n in own.items() if n > 0}
            entry = replace(entry, nbytes=own, note=f"shares {owner.key}")
        result.append(entry)
    return result


def _sum_by_device(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for part in parts:
        for device, nbytes in part.items():
            total[device] = total.get(device, 0) + nbytes
    return total
