"""Plans what goes where, before the first weight byte is read: weights, cache, workspaces, experts that fill GPUs.

    plan                       experts on the CPU in RAM, or in files where RAM is short
      plan_or_cpu              the CPU alone, where GPUs do not fit and nobody asked for them
        _plan_one_or_all_gpus  the first GPU, or layers spread over all
          _plan_all            rules, cache, workspaces, draft model, tower; of what is left: staging for prompts, then
                               slots for hot experts beside whole layers' experts (_fill_gpus); slots in RAM

Knows plans and what an engine needs beside its weights; does not load anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ktransformers.cache.paged import LayerShape, PagedCache, state_shapes
from ktransformers.cache.state import StateCache
from ktransformers.config import hot_slots
from ktransformers.engine.model.fingerprint import ModelDigests
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.plan.attention import choose_attention, materialization_nbytes
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.cache_shapes import cache_shapes
from ktransformers.engine.plan.draft_steps import check_lenders
from ktransformers.engine.plan.expert_disk import has_files, open_expert_files
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.kv_types import KvTypes
from ktransformers.engine.plan.planned import Planned, PlannedDraft
from ktransformers.engine.plan.tier_plan import tier_bytes
from ktransformers.engine.plan.tower_plan import with_tower
from ktransformers.engine.plan.unused_flags import report_unused
from ktransformers.engine.step.graph_sizes import largest_graph
from ktransformers.errors import ConfigError, FormatError, TensorMismatchError, UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType
from ktransformers.models.registry import default_optimize_rules, ignorable_tensors
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.base import ExpertStats, OperatorConfig
from ktransformers.operators.device import Device, Devices
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.operators.partial_sums import share_nbytes
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.optimize.expert_slots import (
    CHUNK_FROM_DISK,
    EXPERT_SLOTS,
    describe_slots,
    reserve_of,
    with_expert_slots,
)
from ktransformers.optimize.fill import Filling, experts_for_gpus
from ktransformers.optimize.hot_slots import (
    HotSlots,
    LearnedPicks,
    plan_hot_slots,
    whole_layers_beside_slots,
    with_hot_slots,
)
from ktransformers.optimize.layer_devices import spread_layers
from ktransformers.optimize.plan import Choices, Plan, format_bytes, make_plan
from ktransformers.optimize.rules import Rules, load_rules
from ktransformers.optimize.streaming import (
    Streaming,
    chunk_size_for,
    plan_streaming,
    step_nbytes,
    with_long_steps,
    with_streaming,
)

__all__ = ["Planner"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans one model with its cache. pool: None where nothing is to be loaded. is_draft: whether it drafts for another
    model, whose activations then lie where its own do, and for which no memory is spent on streaming its experts.
    expert_files: what experts on the CPU are read from while the model runs; None: all of them are in RAM."""

    opened: OpenedModel
    pool: WorkerPool | None
    cache_plan: CachePlan
    expert_stats: ExpertStats = field(default_factory=ExpertStats)
    is_draft: bool = False
    expert_files: ExpertFiles | None = None
    _rules: list[Rules] = field(default_factory=list, repr=False, compare=False)
    _draft_rules: list[Rules] = field(default_factory=list, repr=False, compare=False)
    _learned: list[LearnedPicks | None] = field(default_factory=list, repr=False, compare=False)

    def plan(self, hardware: Hardware) -> tuple[Planned, Hardware]:
        """Return the plan on `hardware`, or on its CPU alone where that fits, GPUs do not, and nobody asked for
        them."""
        planned, hardware = self._plan_ram_or_files(hardware)
        planned.report(with_experts=not self.is_draft)
        if not self.is_draft:  # PlannedDraft says where a draft model goes
            planned.plan.report_fallback()
            report_unused(self.opened.config, planned.plan, self.opened.source)
        config, operators = self.opened.config, planned.plan.operators
        if config.lend_slots and not planned.long_rows and not self.is_draft:
            reason = "these slots do not lend here" if planned.hots else "no GPU has slots for experts"
            logger.warning("--lend_slots has no effect: %s", reason)
        KvTypes.of(config.kv_type, self.opened.model, operators, config.attention_products).report(planned.shapes)
        return planned, hardware

    def _plan_ram_or_files(self, hardware: Hardware) -> tuple[Planned, Hardware]:
        """Experts on the CPU are in RAM, or in files where that is asked for, or where they do not fit otherwise."""
        config = self.opened.config
        wanted = "ram" if self.is_draft else config.experts_from
        planned, settled = (self._with_files() if wanted == "disk" else self).plan_or_cpu(hardware)
        if wanted == "disk" and planned.expert_files is None:  # no experts are left to the CPU
            planned, settled = self.plan_or_cpu(hardware)
        is_short = planned.plan.total_bytes.get("cpu", 0) > planned.plan.capacity.get("cpu", 0)
        is_divided = config.pipeline > 1 or config.tensor_parallel > 1
        if wanted != "auto" or not is_short or is_divided or not has_files(self.opened):
            return planned, settled
        try:
            instead, on = self._with_files().plan_or_cpu(hardware)
        except (ConfigError, FormatError) as error:
            logger.warning("experts do not fit into RAM, and cannot be read from the disk as they are used: %s", error)
            return planned, settled
        return (planned, settled) if instead.plan.misfit() is not None else (instead, on)

    def _with_files(self) -> Planner:
        """The same for experts in files. Raises UnsupportedError where there are none, FormatError or ConfigError for a
        packed file that is damaged, or of another model."""
        return replace(self, expert_files=open_expert_files(self.opened))

    def plan_or_cpu(self, hardware: Hardware) -> tuple[Planned, Hardware]:
        """Return what `plan` does, with experts where this planner has them and without a word."""
        planned = self._plan_one_or_all_gpus(hardware)
        reason = planned.plan.misfit()
        config = self.opened.config
        is_wanted = config.use_cuda is not None or hot_slots(config.hot_experts) is not None
        if reason is None or is_wanted or not hardware.has_gpus:
            return planned, hardware
        cpu = hardware.without_gpus()
        instead = self._plan_one_or_all_gpus(cpu)
        if instead.plan.misfit() is not None:
            return planned, hardware
        logger.warning("the GPU is left alone, everything runs on the CPU (--use_cuda makes this an error): %s", reason)
        return instead, cpu

    def _plan_one_or_all_gpus(self, hardware: Hardware) -> Planned:
        """On the first GPU, or over all of them where that brings more experts there, or is needed, or asked for."""
        planned = self._plan_all(hardware, {})
        gpus = {name: free for name, free in planned.plan.capacity.items() if name != "cpu"}
        config = self.opened.config
        if len(gpus) < 2 or (config.optimize_config_path is not None and not config.spread_layers):
            return planned
        if config.spread_layers:
            return self._plan_all(hardware, spread_layers(len(planned.plan.layer_devices), gpus))
        is_short = planned.plan.misfit() is not None
        if not is_short and not planned.expert_bytes_on_cpu:
            return planned
        transfer = spread_layers(len(planned.plan.layer_devices), gpus)
        spread = self._plan_all(hardware, transfer)
        is_better = is_short or spread.expert_bytes_on_cpu < planned.expert_bytes_on_cpu
        return planned if spread.plan.misfit() is not None or not is_better else spread

    def _plan_all(self, hardware: Hardware, transfer: Mapping[int, str], *, may_lend: bool = True) -> Planned:
        """A plan with its cache and its workspaces, and with experts in what is left of the GPUs if that is ours to
        decide. may_lend: whether there may be steps that slots lend memory to, unless nothing else fits."""
        opened = self.opened
        plan, shapes = self._plan_weights(hardware, Choices(self._divided(hardware), transfer))
        num_slots = self.cache_plan.num_slots(opened, plan, shapes)
        chunk_size = self._chunk_size(plan)
        num_states = self.cache_plan.num_states(shapes, num_slots, opened.config)
        extra = self._beside_weights(plan, hardware, chunk_size, shapes, num_slots, num_states)
        plan = replace(plan, extra_bytes=extra)
        draft = self._planned_draft(Planned(plan, chunk_size, (), shapes, num_slots, num_states, Filling()), hardware)
        if draft is not None:  # before anything fills what is left
            plan = plan.with_extra("draft model", draft.nbytes)
        plan, tower = with_tower(plan, opened.tower, opened.config)
        plan, long_rows = self._with_long_steps(plan, chunk_size) if may_lend else (plan, 0)
        plan, streamings = with_streaming(plan, self._streamings(plan, chunk_size, long_rows))
        filling, hots = Filling(), tuple[HotSlots, ...]()
        if _gpus_of(plan):
            filling, hots = self._fill_gpus(plan)
        if filling.moved:
            again = self._plan_weights(hardware, Choices(filling.moved, transfer))[0]
            plan, streamings = with_streaming(replace(again, extra_bytes=plan.extra_bytes), streamings)
        plan, hots = with_hot_slots(plan, hots)
        beside = [] if draft is None else [one.planned.plan for one in draft.chain if one.shares_slots]
        if self.expert_files is not None and self.expert_files.owner is None:
            asked = int(opened.config.experts_ram * 2**30)
            others = 0 if draft is None else sum(one.expert_ram for one in draft.chain)
            plan = with_expert_slots(plan, asked and max(asked - others, 1), opened.facts.top_k(), beside)
        if long_rows and (not hots or plan.misfit() is not None):
            return self._plan_all(hardware, transfer, may_lend=False)
        files = self.expert_files if plan.stored_experts or beside else None
        return Planned(
            plan, chunk_size, streamings, shapes, num_slots, num_states, filling, transfer, hots, draft, tower, files
        )

    def _beside_weights(
        self,
        plan: Plan,
        hardware: Hardware,
        chunk_size: int,
        shapes: list[LayerShape],
        num_slots: int,
        num_states: int,
    ) -> dict[str, dict[str, int]]:
        """The bytes of cache and workspaces, by what they are for and by device."""
        opened = self.opened
        extra = {"kv cache": PagedCache.size_by_place(shapes, num_slots)}
        if num_states:
            extra["states"] = StateCache.size_by_place(state_shapes(shapes), num_states)
        self.cache_plan.check_tiers(shapes, opened.config)
        if tier_bytes(opened.config):
            extra["kv tiers"] = {"cpu": tier_bytes(opened.config)}
        step, gpus = step_nbytes(opened.facts, chunk_size), _gpus_of(plan)
        if gpus:
            materialization = materialization_nbytes(plan, opened.config.attention_backend)
            scans = _scans(plan, chunk_size)
            extra["workspace"] = {
                gpu.name: (0 if self.is_draft else max(gpu.workspace_nbytes(), step))
                + materialization.get(gpu.name, 0)
                + scans.get(gpu.name, 0)
                for gpu in gpus
            }
            if opened.partial_sums is not None and opened.partial_sums.group.size > 1:
                shares = share_nbytes(chunk_size, opened.facts.hidden_size)
                extra["sums over gpus"] = {gpu.name: shares for gpu in gpus}
            rows = largest_graph(hardware.graph_rows, chunk_size)
            if rows and opened.config.use_cuda_graph is not False:  # memory of their own, which they share
                extra["cuda graphs"] = {gpu.name: step_nbytes(opened.facts, rows) for gpu in gpus}
        tables = _rope_tables(plan, opened.facts.longest_sequence(num_slots))
        if tables:
            extra["rope table"] = tables
        flash = choose_attention(plan, opened.config.attention_backend, opened.config.kv_type).nbytes(plan)
        if flash:
            extra["flashinfer"] = flash
        return extra

    def _chunk_size(self, plan: Plan) -> int:
        config = self.opened.config
        chosen = chunk_size_for(config.chunk_size, plan, self.opened.facts)
        return chosen if config.chunk_size or self.expert_files is None else max(chosen, CHUNK_FROM_DISK)

    def _with_long_steps(self, plan: Plan, chunk_size: int) -> tuple[Plan, int]:
        """`plan` with room for steps on memory that slots lend, where steps are those of one process and one model."""
        opened, config = self.opened, self.opened.config
        is_alone = opened.partial_sums is None and config.pipeline == 1 and not self.is_draft
        is_drafting = opened.draft is not None or config.drafter == "mtp"
        if not is_alone or is_drafting or self.expert_files is not None:
            return plan, 0
        if config.hot_experts == "off" or config.lend_slots is False:
            return plan, 0
        may_move = config.optimize_config_path is None
        return with_long_steps(plan, opened.source, opened.facts, chunk_size, may_move=may_move)

    def _streamings(
        self, plan: Plan, chunk_size: int, long_rows: int = 0, *, is_said: bool = True
    ) -> tuple[Streaming, ...]:
        if self.is_draft or self.expert_files is not None:
            return ()
        source, facts = self.opened.source, self.opened.facts
        return plan_streaming(plan, source, facts, chunk_size, long_rows=long_rows, is_said=is_said)

    def _divided(self, hardware: Hardware) -> dict[str, str]:
        """Return the GPU of the routed experts of which a worker has a part, as the driver's plan says."""
        sums, gpus = self.opened.partial_sums, [name for name in hardware.machine.devices if name != "cpu"]
        return {} if sums is None or not sums.group.rank or not gpus else dict.fromkeys(sums.experts, gpus[0])

    def _planned_draft(self, target: Planned, hardware: Hardware) -> PlannedDraft | None:
        """Plan the model that drafts, beside what the target holds so far. Raises UnsupportedError for an MTP layer
        that is not made of what the family's layers are."""
        if self.opened.draft is None:
            return None
        try:
            return self._placed_draft(self.opened.draft, target, hardware)
        except TensorMismatchError as error:
            if self.opened.config.drafter != "mtp":
                raise
            raise UnsupportedError(
                f"--speculative mtp: this model's layer for multi-token prediction ({self.opened.facts.model_type}) is "
                f"of a kind that is not known here: {error}; take --speculative ngram, or --draft_model"
            ) from error

    def _placed_draft(self, draft: OpenedModel, target: Planned, hardware: Hardware) -> PlannedDraft:
        """With experts in RAM; where the target's are in files, those of its own layers in the same slots, and others
        in slots of their own where RAM has no room for all."""
        config = replace(draft.config, cache_lens=target.num_slots, chunk_size=target.chunk_size)
        size = self.cache_plan.page_size(target.shapes)
        batch = self.cache_plan.max_batch_size
        spare = 0 if draft.dspark is None else batch * draft.dspark.num_spare_pages(size)
        cache_plan = CachePlan(batch, size, slots=target.num_slots + spare * size)
        planner = Planner(replace(draft, config=config), None, cache_plan, is_draft=True, _rules=self._draft_rules)
        if self.expert_files is None:
            return self._draft_on(planner, target, hardware)
        if self.opened.config.draft_model is None:  # its own layer for multi-token prediction
            files = self.expert_files.of_mtp_layer(self.opened.facts.num_layers)
            try:
                return self._draft_on(replace(planner, expert_files=files), target, hardware)
            except UnsupportedError as error:
                found = self._draft_on(planner, target, hardware)
                return replace(found, experts=f"experts of the layer that drafts are in RAM: {error}")
        found = self._draft_on(planner, target, hardware)
        return found if not found.planned.expert_bytes_on_cpu else self._with_a_share(found, planner, target, hardware)

    def _with_a_share(
        self, in_ram: PlannedDraft, planner: Planner, target: Planned, hardware: Hardware
    ) -> PlannedDraft:
        """A draft model with all experts in RAM where that leaves the target's what they need, else with slots: as
        large a part of what there is for the experts of both as its own are of these.

        That is --experts_ram, or else what is left: the same number gives the same plan, whatever else is free.
        """
        ram, least = target.plan.capacity["cpu"], with_expert_slots(target.plan, 1, self.opened.facts.top_k())
        needed, wanted = least.extra_bytes[EXPERT_SLOTS]["cpu"], in_ram.expert_ram
        left = ram - reserve_of(ram) - (least.total_bytes["cpu"] - needed)
        asked = int(self.opened.config.experts_ram * 2**30)
        if wanted <= (asked or left - (in_ram.nbytes["cpu"] - wanted)) - needed:
            room = format_bytes(wanted)
            return replace(in_ram, experts=f"experts of the draft model are in RAM, which has room for them ({room})")
        try:
            files = open_expert_files(planner.opened)
            found = self._draft_on(replace(planner, expert_files=files), target, hardware)
        except (ConfigError, FormatError) as error:
            return replace(in_ram, experts=f"experts of the draft model are in RAM: {error}")
        stored, others = found.planned.plan.stored_experts, target.plan.stored_experts
        if not stored:
            return in_ram
        both = asked or left - (found.nbytes["cpu"] - found.expert_ram)
        share = max(min(both * stored // (stored + others), both - needed), 1)
        opened = replace(planner.opened, config=replace(planner.opened.config, experts_ram=share / 2**30))
        found = self._draft_on(replace(planner, opened=opened, expert_files=files), target, hardware)
        return replace(found, experts=f"the draft model: {describe_slots(found.planned.plan)}")

    def _draft_on(self, planner: Planner, target: Planned, hardware: Hardware) -> PlannedDraft:
        """On the GPU of the target's last layer if that has room, else on the CPU. One that attends to the target's
        keys and values goes nowhere else than these."""
        draft, cache_plan = planner.opened, planner.cache_plan
        hardware = replace(hardware, devices=Devices(hardware.devices.gpu))  # with work space of their own
        plan, last = target.plan, target.layer_devices[-1:]
        if draft.facts.is_borrowing:
            check_lenders(draft, self.opened, target.shapes, last[0].name if last else "cpu")
        if last and last[0].is_gpu:
            name = last[0].name
            left = max(plan.capacity[name] - plan.total_bytes[name], 0)
            streamed = with_streaming(plan, self._streamings(plan, target.chunk_size, is_said=False))[0]
            # Experts of the draft model stay in RAM where they would take what prompts stream the target's through, or
            # room for the target's, of which most steps read more.
            rooms = [max(left - streamed.total_bytes[name] + plan.total_bytes[name], 0), left]
            while rooms:
                beside = hardware.within({"cpu": hardware.machine.devices["cpu"], name: rooms.pop(0)})
                planned = planner._plan_all(beside, {})
                if planned.plan.misfit() is None:
                    found = PlannedDraft(draft, cache_plan, beside, planned)
                    filled = planned.filled_nbytes(name)
                    if not filled or self._takes_all(plan.with_extra("draft model", found.nbytes)):
                        return found
                    rooms = [planned.plan.total_bytes[name] - filled]
            if draft.facts.is_borrowing:  # then both do not fit
                return PlannedDraft(draft, cache_plan, beside, planned)
        cpu = hardware.without_gpus()
        return PlannedDraft(draft, cache_plan, cpu, planner._plan_all(cpu, {}))

    def _takes_all(self, plan: Plan) -> bool:
        """Whether all routed experts fit on GPUs beside what `plan` holds."""
        return experts_for_gpus(plan, self.opened.source).is_all

    def _fill_gpus(self, plan: Plan) -> tuple[Filling, tuple[HotSlots, ...]]:
        """What goes to the room that a plan leaves on GPUs: slots for the experts of all layers, and whole layers.

        Where all experts fit, they go there whole, however many slots are asked for.
        """
        source, facts, asked = self.opened.source, self.opened.facts, self.opened.config.hot_experts
        if self.opened.config.optimize_config_path is not None:
            return Filling(), plan_hot_slots(plan, source, facts, asked)
        whole = experts_for_gpus(plan, source)
        if whole.is_all:
            return whole, ()
        if asked != "auto":
            hots = plan_hot_slots(plan, source, facts, asked)
            return (experts_for_gpus(with_hot_slots(plan, hots)[0], source) if hots else whole), hots
        if not self._learned:  # read once, as the rules are
            learned = HotFile(ModelDigests.of(self.opened)).read() if HotFile.has_any() else {}
            self._learned.append(LearnedPicks.of(learned.values()))
        most = whole_layers_beside_slots(plan, source, facts, whole.moved, self._learned[0])
        filling = experts_for_gpus(plan, source, most)
        hots = plan_hot_slots(plan, source, facts, asked, filling.moved, filling.left)
        with_slots = {hot.device for hot in hots}
        if any(device not in with_slots for device in most):  # too little for slots is enough for whole layers
            most = {device: count for device, count in most.items() if device in with_slots}
            filling = experts_for_gpus(plan, source, most)
        return filling, hots

    def _plan_weights(self, hardware: Hardware, choices: Choices) -> tuple[Plan, list[LayerShape]]:
        """The plan, without a cache, and the shape of each layer's cache."""
        opened = self.opened
        config, model = opened.config, opened.model
        if not self._rules:  # read once: what it logs is said once
            path = config.optimize_config_path or default_optimize_rules(opened.facts, model)
            self._rules.append(load_rules(path, config.trust_rules))
        (rules,) = self._rules
        is_unused = ignorable_tensors(model)
        quant = None if config.cpu_quant is None else QuantType[config.cpu_quant.upper()]
        plan = make_plan(
            model,
            rules,
            operator_config=OperatorConfig(
                opened.facts,
                self.pool,
                quant,
                config.cpu_prefill,
                config.cpu_bf16,
                self.expert_stats,
                hardware.devices,
                config.sparse_attention,
                opened.partial_sums,
                self.expert_files,
            ),
            source=opened.source,
            machine=hardware.machine.with_gpu_budget(int(config.gpu_memory * 2**30)),
            strict=config.strict,
            ignorable=lambda name: opened.source.ignorable(name) or is_unused(name),
            choices=choices,
        )
        layer_devices = [plan.devices[layer_device.device] for layer_device in plan.layer_devices]
        shapes = cache_shapes(model, opened.facts, plan.operators, layer_devices or None)
        kv_types = KvTypes.of(config.kv_type, model, plan.operators, config.attention_products)
        return plan, kv_types.applied(shapes)


def _gpus_of(plan: Plan) -> list[Device]:
    """The GPUs that a plan has put something on."""
    used = sorted({entry.placement.generate_device for entry in plan.entries})
    return [plan.devices[name] for name in used if plan.devices[name].is_gpu]


def _scans(plan: Plan, num_rows: int) -> dict[str, int]:
    """{GPU: bytes that scans of layers with a state work in there}, in a step of so many rows: one after the other."""
    needs: dict[str, int] = {}
    for operator in plan.operators.values():
        if isinstance(operator, RecurrentOperator) and operator.device.is_gpu:
            name = operator.device.name
            needs[name] = max(needs.get(name, 0), operator.scan_nbytes(num_rows))
    return needs


def _rope_tables(plan: Plan, longest: int) -> dict[str, int]:
    """{GPU: bytes of the rotary tables there}, for sequences of up to `longest` tokens."""
    tables: dict[str, int] = {}
    for operator in plan.operators.values():
        nbytes = operator.table_nbytes(longest) if isinstance(operator, KRotaryEmbedding) else 0
        if nbytes:
            tables[operator.device.name] = tables.get(operator.device.name, 0) + nbytes
    return tables
