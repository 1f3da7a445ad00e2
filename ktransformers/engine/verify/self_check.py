"""A loaded model of a family that no test covers, compared with transformers' own modules before it answers anything.

Layers, the embeddings and the head are computed by both on random tokens, more than any window holds: ours through the
cache, in one step and in two chunks; the reference module's (reference_module.py) in fp32 from the same numbers. Each
layer of ours is given what the reference module's was given, so that a difference has one place:

    theirs tokens ── embeddings ── layer 0 ── (handed on) ── layer 7 ── ... ── norm, head ── logits
                          │           │                         │                              │
    ours   tokens ── embeddings =? ── layer 0 =? ────────────── layer 7 =? ────────────── logits =?

One layer of each kind is computed, and the last of the kind; the others hand on what they are given. Errors are
measured row by row against what a layer changes. How large they may be is measured too, where activations are rounded
to int8 or bf16: by rounding them in the reference module in front of every product, which is what rounding alone does
to a layer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.verify.checked_model import CheckedModel
from ktransformers.engine.verify.layer_kinds import made_of
from ktransformers.engine.verify.layer_pass import LayerPass, Trace, model_layers
from ktransformers.engine.verify.reference_module import StoredWeights, build_reference_model, routed_experts
from ktransformers.errors import MODULE_FAILURES, KTransformersError, UnsupportedError, named_reason
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import is_tested
from ktransformers.operators.attention.rope import resolve_rotations
from ktransformers.operators.comparison import MEDIAN, Measure, Tolerance, difference, quantile
from ktransformers.operators.layers.cpu import FusedLayer
from ktransformers.operators.layers.streams import StreamsLayer
from ktransformers.operators.layers.traced import LayerCall, layer_list
from ktransformers.operators.recorder import RecordedCall, fp32_copy, intercepted, recorded_calls, tensors_in
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.tied import TiedSource

__all__ = ["check_model", "is_checked"]

logger = logging.getLogger(__name__)

_MOST_ROWS, _LEAST_ROWS = 1024, 64
_BEYOND = 8  # rows that see less than all before them
_FLOOR, _FLOOR_BF16 = 1e-4, 2e-2
"""Of a layer's change: what sums in another order, tables of angles and other exponentials may differ by, in fp32 and
where a GPU attends in bf16. A wrong formula is off by 0.1 and more."""
_MARGIN = 4.0
"""How much further off ours may be than rounding in front of every product puts the reference: ours rounds elsewhere
too (between the experts' two products, in the parts of latent attention), and other values of the same blocks."""
_EXPERT_BYTES = 2 << 30
"""Of experts in fp32, per layer. Where there are more, they are computed for the last rows alone."""
_MOST_WORK_OF_A_PART, _MOST_WORK = 1 << 33, 1 << 37
"""Products of a feed-forward part, and of all layers, in a pass of the reference: a core takes some tenths of a second,
and some seconds, for them. Wider parts see the last rows alone; beyond the latter one layer of each kind is
computed."""
_LEAST_ROWS_OF_A_PART = 64
_MOST_LAYERS = 8

_FAILURES = (*MODULE_FAILURES, ImportError, KTransformersError)


class _ReferenceFails(Exception):
    """transformers' own modules cannot be computed here."""


def is_checked(opened: OpenedModel) -> bool:
    """Whether no test covers a model's family, so that it is compared with transformers' modules."""
    config = opened.config
    if config.model_path is None and config.gguf_path is None:
        return False  # random weights, which are measured and answer nothing
    return config.self_check and not is_tested(opened.facts)


@torch.inference_mode()
def check_model(
    opened: OpenedModel,
    plan: Plan,
    ours: CheckedModel,
    calls: Sequence[LayerCall],
    max_len: int,
) -> None:
    """Compare the loaded model with transformers' modules, unless tests cover its family or --no_self_check is given.

    calls: of its layers, as the first step saw them. max_len: most positions of a sequence. Raises UnsupportedError,
    which names the module that differs.
    """
    if not is_checked(opened):
        return
    started, kind = time.monotonic(), opened.facts.model_type
    try:
        check = _Check(opened, plan, ours, _num_rows(opened.facts, calls, max_len), max_len)
        found = check.run()
    except _ReferenceFails as error:
        logger.warning(
            "self check: transformers' own modules of model type %s fail here (%s), so nothing was compared",
            kind,
            error,
        )
        return
    seconds = time.monotonic() - started
    if found is None:
        logger.info("self check: %s as transformers computes it: %s (%.1f s)", kind, check.summary(), seconds)
        return
    raise UnsupportedError(
        f"model type {kind}: {found}, so its answers would be wrong; no test covers this family. Please report it; "
        "--no_self_check runs it anyway"
    )


def _num_rows(facts: ModelFacts, calls: Sequence[LayerCall], max_len: int) -> int:
    """Some more than the largest window."""
    windows = [asked.window for call in calls for asked in call.attention]
    windows += [layer.window or 0 for layer in facts.layers]
    window = max((size for size in windows if isinstance(size, int) and size <= _MOST_ROWS), default=0)
    return max(min(max(window + _BEYOND, _LEAST_ROWS), max_len), 2)


@dataclass(frozen=True, slots=True)
class _Place:
    """Hidden states or logits that are compared. base: what a layer was given; rounded: with rounding in the reference
    module.
    """

    what: str
    ours: torch.Tensor
    want: torch.Tensor
    base: torch.Tensor | None = None
    rounded: torch.Tensor | None = None
    index: int | None = None


def _selected(layers: Sequence[nn.Module], work: Callable[[int], int]) -> frozenset[int]:
    """The first layer of each kind and, as long as they are few and quick, the last. work: of a layer, in products."""
    kinds: dict[tuple[object, ...], list[int]] = {}
    for index, layer in enumerate(layers):
        kinds.setdefault(made_of(layer), []).append(index)
    chosen = [found[0] for found in kinds.values()][:_MOST_LAYERS]
    left = _MOST_WORK - sum(map(work, chosen))
    for index in [found[-1] for found in kinds.values()][: _MOST_LAYERS - len(chosen)]:
        left -= work(index) * (index not in chosen)
        if left >= 0:
            chosen.append(index)
    return frozenset(chosen)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _feed_forward_parts(layer: nn.Module) -> Iterator[nn.Module]:
    """What is neither attention nor routed: it computes row by row."""
    for child in layer.children():
        has_state = any(hasattr(part, "layer_idx") for part in child.modules())
        if not has_state and any(isinstance(part, nn.Linear) for part in child.modules()):
            yield child


class _Check:
    """One model's comparison."""

    def __init__(self, opened: OpenedModel, plan: Plan, ours: CheckedModel, num_rows: int, max_len: int):
        self.ours, self.plan = ours, plan
        config = opened.hf_config
        generator = torch.Generator().manual_seed(11)
        self.ids = torch.randint(0, int(config.vocab_size), (num_rows,), generator=generator)
        self.is_rough = any(device.dtype is not torch.float32 for device in ours.layout.devices)
        try:
            self.reference = build_reference_model(config, opened.config.trust_remote_code)
            resolve_rotations(self.reference, max_len)
            self.layers = model_layers(self.reference)
            self.weights = StoredWeights(self.reference, TiedSource(opened.source, plan.tied), plan, ours.pool)
            self.last_rows = self._limit_wide_parts()
        except _FAILURES as error:
            raise _ReferenceFails(named_reason(error)) from error
        self.selected = _selected(self.layers, self._work_of)
        if self.last_rows:
            logger.info("self check: comparing %s, which takes a while (--no_self_check)", config.model_type)

    def run(self) -> str | None:
        """Say in words what differs; None when nothing does."""
        try:
            exact = self._reference_pass(self.selected, None, is_rounded=False)
        except _ReferenceFails:  # layers that take something from each other
            logger.debug("self check: layers alone cannot be computed", exc_info=True)
            self.selected = frozenset(range(len(self.layers)))
            exact = self._reference_pass(self.selected, None, is_rounded=False)
        rounded = self._reference_pass(self.selected, exact, is_rounded=True) if self.weights.rounds else None
        num_rows = len(self.ids)
        runs = [(num_rows,), (num_rows - max(num_rows // 3, 1), num_rows)]
        if self.last_rows:  # one run has to do: most rows, more than a window, then some behind them
            runs = [(num_rows - self._num_logits, num_rows)]
        for cuts in runs:
            how = "" if len(cuts) == 1 else ", in two chunks"
            try:
                got = self._computed(cuts, exact)
            except _FAILURES as error:
                logger.debug("self check: a step fails", exc_info=True)
                return f"a step of {num_rows} tokens{how} fails with {named_reason(error)}"
            found = self._compare(got, exact, rounded, how)
            if found is not None:
                return found
        return None

    def summary(self) -> str:
        count, total = len(self.selected), len(self.layers)
        text = f"embeddings, {count} of {total} layers and the head, on {len(self.ids)} tokens"
        rows = sorted(set(self.last_rows.values()))
        return text + (f"; wide parts for the last {rows[0]} of them only" if rows else "")

    @property
    def _num_logits(self) -> int:
        most = _BEYOND // 2 if self.last_rows else _BEYOND
        return max(min(most, len(self.ids) // 3), 1)

    def _reference_pass(self, selected: frozenset[int], given: Trace | None, *, is_rounded: bool) -> Trace:
        """One pass of the reference module. Raises _ReferenceFails."""
        layers = LayerPass(selected, given)
        self.weights.is_rounded = is_rounded
        num_rows = len(self.ids)
        keep = torch.arange(num_rows - self._num_logits, num_rows)
        try:
            with self.weights, intercepted(enumerate(self.layers), layers.run):
                output = self.reference(input_ids=self.ids[None], use_cache=False, logits_to_keep=keep)
        except _FAILURES as error:
            raise _ReferenceFails(named_reason(error)) from error
        layers.trace.logits = output.logits[0].float().clone()
        if not all(bool(out.isfinite().all()) for out in layers.trace.outputs.values()):
            raise _ReferenceFails("its hidden states are not finite")
        return layers.trace

    def _computed(self, cuts: Sequence[int], given: Trace) -> Trace:
        """The tokens in steps of our operators that end at `cuts`; logits of the last rows."""
        cache, joined, start = self.ours.cache(len(self.ids)), None, 0
        for end in cuts:
            layers = LayerPass(self.selected, given, slice(start, end))
            keep = torch.arange(max(end - start - self._num_logits, 0), end - start)
            with intercepted(enumerate(model_layers(self.ours.model)), layers.run):
                logits = self.ours.step(self.ids[start:end], cache, start, keep)
            layers.trace.logits = logits.float().clone()
            joined = layers.trace if joined is None else joined.followed_by(layers.trace)
            start = end
        assert joined is not None
        return joined

    def _limit_wide_parts(self) -> dict[str, int]:
        """Let experts that are many and large, and feed-forward parts that are wide, see the last rows alone; how many,
        by the name of the module.
        """
        limited, experts = dict[str, int](), routed_experts(self.reference)
        for key, (_, layout) in experts.items():
            expert = 4 * (3 if layout.has_gate else 2) * layout.hidden_size * layout.intermediate_size
            if expert * layout.num_experts > _EXPERT_BYTES:
                limited[key] = max(_EXPERT_BYTES // expert // 8, 1)
        names = {id(module): name for name, module in self.reference.named_modules()}
        routed = {id(module) for module, _ in experts.values()}
        for part in (part for layer in self.layers for part in _feed_forward_parts(layer)):
            rows = max(_MOST_WORK_OF_A_PART // max(_num_weights(part), 1), _LEAST_ROWS_OF_A_PART)
            if rows < len(self.ids) and not any(id(inner) in routed for inner in part.modules()):
                limited[names[id(part)]] = rows
        for key, rows in limited.items():
            _see_last_rows(self.reference.get_submodule(key), rows)
        return limited

    def _work_of(self, index: int) -> int:
        """Products of a layer in a pass; experts, of which a row sees few, excepted."""
        num_rows = len(self.ids)
        seen = self.last_rows | dict.fromkeys(routed_experts(self.reference), 0)  # rows, by the name of the module
        inside = [(self.reference.get_submodule(key), rows) for key, rows in seen.items() if f".{index}." in key]
        left_out = sum(_num_weights(module) * (num_rows - rows) for module, rows in inside)
        return _num_weights(self.layers[index]) * num_rows - left_out

    def _compare(self, got: Trace, exact: Trace, rounded: Trace | None, how: str) -> str | None:
        """What differs, in words."""
        first, noise = min(exact.inputs), rounded or Trace()
        places = [
            _Place(f"layer {i}", got.outputs[i], exact.outputs[i], exact.inputs[i], noise.outputs.get(i), i)
            for i in sorted(exact.outputs)
        ]
        places.insert(0, _Place("the embeddings", got.inputs[first], exact.inputs[first]))
        assert got.logits is not None
        assert exact.logits is not None
        places.append(_Place("the logits", got.logits, exact.logits, None, noise.logits))
        for place in places:
            if place.ours.shape != place.want.shape:
                return f"{place.what}{how} have the shape {list(place.ours.shape)}, not {list(place.want.shape)}"
            off = self._off(place)
            if off is not None:
                where = place.what if place.index is None else self._culprit(place.index, exact)
                return f"{where} differ{'s' * (place.index is not None)} from transformers': {place.what}{how} {off}"
        return None

    def _rows_of(self, index: int | None) -> int:
        """The last rows that can be compared; 0: all."""
        if index is None:
            return 0
        inside = [rows for key, rows in self.last_rows.items() if f".{index}." in key]
        return min(inside, default=0)

    def _culprit(self, index: int, exact: Trace) -> str:
        """The innermost module of a layer that turns the same into something else."""
        ours = model_layers(self.ours.model)[index]
        if isinstance(ours, FusedLayer | StreamsLayer):
            layers = layer_list(self.ours.model)
            assert layers is not None
            layers[index] = ours.inner
        with recorded_calls(_parts(self.layers[index])) as wanted:
            self._reference_pass(self.selected, exact, is_rounded=False)
        with recorded_calls(_parts(model_layers(self.ours.model)[index])) as calls:
            self._computed((len(self.ids),), exact)
        got = {call.key: call for call in calls}
        key = next(name for name, module in self.reference.named_modules() if module is self.layers[index])
        near, last = 0.1 if self.is_rough or self.weights.rounds else 1e-3, self._rows_of(index)
        for want in {call.key: call for call in wanted}.values():
            ours_of = got.get(want.key)
            if ours_of is not None and _is_culprit(ours_of, want, near, last):
                return f"{key}.{want.key} ({type(self.layers[index].get_submodule(want.key)).__name__})"
        return f"{key} ({type(self.layers[index]).__name__})"

    def _off(self, place: _Place) -> str | None:
        """By how much, in words; None when it is near enough."""
        bits = 2.0**-8 if self.is_rough else 2.0**-22  # of the type in which changes are added up
        return difference(
            place.ours,
            place.want,
            Tolerance(_FLOOR_BF16 if self.is_rough else _FLOOR, bits, _MARGIN),
            given=place.base,
            rounded=place.rounded,
            last=self._rows_of(place.index),
            measures=self._measures(),
        )

    def _measures(self) -> list[Measure]:
        """Rows that are sent to other experts for a difference in the last bit are few."""
        largest = [] if routed_experts(self.reference) else [torch.max]
        return [MEDIAN, lambda rows: torch.median(rows[-_BEYOND:]), quantile(0.9), *largest]


def _parts(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules inside `layer` by name. An operator that stands in for a module has the module's name."""
    named = (
        (".".join(part for part in name.split(".") if part != "inner"), part) for name, part in layer.named_modules()
    )
    return [(name, part) for name, part in named if name]


def _is_culprit(got: RecordedCall, want: RecordedCall, near: float, last: int) -> bool:
    """Whether a module was given the same as the reference's, and made something else of it."""
    sides = [[_first_floats(call.args, call.kwargs), _first_floats(call.output)] for call in (got, want)]
    (given, output), (want_given, want_output) = sides
    if given is None or output is None or want_given is None or want_output is None:
        return False
    return _is_near(given, want_given, near, last) and not _is_near(output, want_output, near, last)


def _first_floats(*values: Any) -> torch.Tensor | None:
    return next((fp32_copy(part) for part in tensors_in(values) if part.is_floating_point()), None)


def _is_near(got: torch.Tensor, want: torch.Tensor, near: float, last: int) -> bool:
    """In most of the last rows; 0: of all. Operators may take rows in other shapes than modules do."""
    if got.numel() != want.numel() or got.shape[-1] != want.shape[-1]:
        return got.numel() == want.numel()  # laid out anew: cannot be told
    rows, wanted = (part.reshape(-1, want.shape[-1]) for part in (got, want))
    return difference(rows, wanted, Tolerance(near), last=last, measures=[quantile(0.9)]) is None


def _see_last_rows(module: nn.Module, count: int) -> None:
    whole = module.forward

    def forward(hidden_states: torch.Tensor, *routing: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        out = torch.zeros_like(rows)
        out[-count:] = whole(
            rows[-count:], *(part[-count:] for part in routing), **{k: v[-count:] for k, v in kwargs.items()}
        )
        return out.view(hidden_states.shape)

    module.forward = forward
