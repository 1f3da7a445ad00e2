"""Traces one real step of a loaded model: the arguments of each decoder layer, and what its attention asks for.

The model's own code decides both, by rules that differ from family to family: which angles a layer gets, whether it has
a window, how often it calls attention. Watching one step finds them without knowing families, and runs everything once
before the first request does.

    model ── mask functions, angles, ... ──> decoder layer ── queries, scale, window, ... ──> attention
                                   noted here                                   and here
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import nn

from ktransformers.cache.paged import LayerShape, PagedCache
from ktransformers.cache.state import StateCache, StateShape
from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.attention.gqa import ATTENTION_NAME, KAttention, attention_forward
from ktransformers.operators.attention.indexer import ChoiceMask
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.context import ForwardContext, StateStep
from ktransformers.operators.exact import NativeMathMode
from ktransformers.operators.recognize.layer import keeps_keywords
from ktransformers.operators.recorder import intercepted

__all__ = [
    "PROBE_ROWS",
    "LayerCall",
    "TracedAttention",
    "check_calls",
    "decoder_layers",
    "failing_module",
    "keep_attention_type",
    "layer_list",
    "pass_context",
    "pass_context_to_attention",
    "pass_context_to_layers",
    "probe_context",
    "probe_ids",
    "probe_logits",
    "trace_step",
]

_WATCHED = "ktransformers_watched"
_MODEL = -1  # in the place of a layer's number

PROBE_ROWS = 3
"""Rows of a step in which layers are compared; one does where they are only watched."""

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Whether a query's position sees a key's position: (batch, head, query, key), as transformers' masking utilities."""


@dataclass(frozen=True, slots=True)
class TracedAttention:
    """Arguments of one call of attention by a module. window: positions that a row sees, itself included; 0: all.

    chunk: positions come in chunks of so many, and a row sees those of its own; 0: they do not. has_factors: queries
    are multiplied by what follows from their positions. is_sparse: an indexer chooses among them.
    """

    scale: float
    window: int
    chunk: int
    softcap: float
    has_sinks: bool
    has_factors: bool = False
    is_sparse: bool = False


@dataclass(slots=True)
class LayerCall:
    """A call of a decoder layer. kwargs: as the model gave them, without mask and context.

    mask: what the model's mask for this layer allows; None when it made none. reads: layers of the cache that it asked
    for, as all attention of ours does.
    """

    kwargs: dict[str, Any]
    args: tuple[Any, ...]
    mask: MaskFunction | None
    attention: list[TracedAttention] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)


class _ProbeCache(PagedCache):
    """Notes in `reads` which layers are asked for, by attention or for their states."""

    def __init__(self, shapes: list[LayerShape], num_pages: int, page_size: int):
        super().__init__(shapes, num_pages, page_size)
        self.reads: list[int] | None = None
        if self.states is not None:
            self.states = _ProbeStates(self.states.shapes, 1, self)

    def layer(self, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reads is not None:
            self.reads.append(layer_idx)
        return super().layer(layer_idx)


class _ProbeStates(StateCache):
    """The states of a probe's cache."""

    def __init__(self, shapes: Mapping[int, StateShape], num_slots: int, cache: _ProbeCache):
        super().__init__(shapes, num_slots)
        self._cache = cache

    def layer(self, layer_idx: int) -> Mapping[str, torch.Tensor]:
        if self._cache.reads is not None:
            self._cache.reads.append(layer_idx)
        return super().layer(layer_idx)


class _MaskStandIn:
    """Goes where a mask would, and carries what it was to be made from."""

    def __init__(self, function: MaskFunction):
        self.function = function


def _stand_in(*args: object, mask_function: MaskFunction, **kwargs: object) -> _MaskStandIn:
    return _MaskStandIn(mask_function)


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a causal LM of `transformers`, in order; empty when it keeps them in another way."""
    return list(layer_list(model) or ())


def layer_list(model: nn.Module) -> nn.ModuleList | None:
    """Return the list that a causal LM of `transformers` keeps its decoder layers in."""
    base = getattr(model, "model", getattr(model, "backbone", None))
    layers = getattr(getattr(base, "inner", base), "layers", None)  # an operator may stand in for the layer loop
    return layers if isinstance(layers, nn.ModuleList) else None


def keep_attention_type(stand_in: nn.Module, layer: nn.Module) -> None:
    """Give what stands in for a layer the name of its kind of attention: some models choose a mask by it."""
    for name in ("attention_type", "block_type"):
        if hasattr(layer, name):
            setattr(stand_in, name, getattr(layer, name))


def pass_context_to_attention(model: nn.Module) -> int:
    """Pass attention the step's context in layers that do not pass their keywords on; return how many layers do not.

    model: with its operators in place.
    """
    layers = [layer for layer in decoder_layers(model) if keeps_keywords(layer)]
    for layer in layers:
        pass_context(layer, [layer.get_submodule("self_attn")])
    return len(layers)


def pass_context_to_layers(model: nn.Module) -> None:
    """Pass layers the step's context in models that do not pass their keywords on."""
    pass_context(model, decoder_layers(model))


def pass_context(module: nn.Module, inner: Iterable[nn.Module]) -> None:
    """Pass the context that `module` is given to modules that run inside of it and are not handed its keywords: not all
    layers of `transformers` hand them down.
    """
    given: list[ForwardContext] = []

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[:] = [kwargs["forward_context"]] if "forward_context" in kwargs else []

    def add(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "forward_context": given[0]} if given and "forward_context" not in kwargs else kwargs

    module.register_forward_pre_hook(note, with_kwargs=True)
    module.register_forward_hook(lambda *_: given.clear(), always_call=True)
    for part in inner:
        part.register_forward_pre_hook(add, with_kwargs=True)


def probe_ids(vocab_size: int) -> torch.Tensor:
    """Return the tokens of probes, int64 [PROBE_ROWS], different ones."""
    return torch.arange(PROBE_ROWS) * max(vocab_size // PROBE_ROWS, 1)


def probe_context(shapes: list[LayerShape], pool: WorkerPool, rows: int, past: int = 0) -> ForwardContext:
    """Return a step of `rows` tokens of one sequence behind `past` random keys, values and states, on a cache of its
    own.

    It rounds nothing, whatever type the shapes have: what is compared there differs by rounding of sums only.
    """
    cache = _ProbeCache([shape.unrounded() for shape in shapes], 1, past + rows)
    generator = torch.Generator().manual_seed(5)
    for layer_idx, shape in enumerate(shapes if past else ()):
        parts = () if shape.state is None or cache.states is None else cache.states.layer(layer_idx).values()
        for tensor in (*cache.layer(layer_idx), *parts):
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    slots = torch.arange(past, past + rows)
    return ForwardContext(
        cache=cache,
        pool=pool,
        phase=Phase.PREFILL,
        page_size=past + rows,
        slot_mapping=slots,
        seq_ids=torch.zeros(rows, dtype=torch.int32),
        kv_lens=(kv_lens := (slots + 1).to(torch.int32)),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        states=None if cache.states is None else _one_sequence(rows, 0 if past else -1, kv_lens),
    )


def _one_sequence(rows: int, read_slot: int, kv_lens: torch.Tensor) -> StateStep:
    """A step whose one sequence has its state in slot 0."""
    bounds, read, write, saves = (
        torch.tensor(values, dtype=torch.int32) for values in ([0, rows], [read_slot], [0], [-1] * rows)
    )
    return StateStep(bounds, read, write, saves, kv_lens, rows)


def probe_logits(
    model: Any,
    shapes: list[LayerShape],
    pool: WorkerPool,
    ids: torch.Tensor,
    positions: torch.Tensor,
    keep: torch.Tensor,
) -> torch.Tensor:
    """Return the logits, [N, vocab], that the own forward of a model that is all on the CPU gives in a probe's step:
    int64 [T] ids and positions, int64 [N] rows to keep. shapes: of the cache.
    """
    context = probe_context(shapes, pool, len(ids))
    with NativeMathMode(pool):
        logits: torch.Tensor = model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=keep,
            forward_context=context,
        ).logits[0]
    return logits


def trace_step(model: nn.Module, run: Callable[[], object]) -> list[LayerCall]:
    """Watch `run`, which runs one step of `model`: one LayerCall a decoder layer, in order.

    Raises UnsupportedError when a layer is not called once, or attention is asked for by nobody's layer.
    """
    calls: list[list[LayerCall]] = [[] for _ in decoder_layers(model)]
    current: list[LayerCall] = []
    contexts: list[Any] = []  # of the step, for models that do not hand it to their layers

    def enter(key: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if key == _MODEL:
            contexts[:] = [kwargs.get("forward_context")]
            return forward(*args, **kwargs)
        args, kwargs, call = _layer_call(args, kwargs)
        calls[key].append(call)
        current[:] = [call]
        cache = getattr(kwargs.get("forward_context") or contexts[0], "cache", None)
        if isinstance(cache, _ProbeCache):
            cache.reads = call.reads
        return forward(*args, **kwargs)

    def attention(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        mask = args[2] if len(args) > 2 else kwargs.get("attention_mask")
        if isinstance(mask, _MaskStandIn):
            args = (*args[:2], None, *args[3:])
        if current:
            current[0].attention.append(_traced_call(module, query, kwargs, isinstance(mask, ChoiceMask)))
        return attention_forward(module, query, *args, **kwargs)

    with intercepted([(_MODEL, model), *enumerate(decoder_layers(model))], enter), _attention_named(model, attention):
        run()
    for index, found in enumerate(calls):
        if len(found) != 1:
            raise UnsupportedError(
                f"layer {index} runs {len(found)} times in a step; layers that run once are supported"
            )
    return [found[0] for found in calls]


def _layer_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any], LayerCall]:
    """What a layer is given, without stand-ins for masks, and its record."""
    values = chain(args, *(part.values() if isinstance(part, dict) else (part,) for part in kwargs.values()))
    mask = next((value.function for value in values if isinstance(value, _MaskStandIn)), None)
    args = tuple(None if isinstance(value, _MaskStandIn) else value for value in args)
    kwargs = {name: None if isinstance(value, _MaskStandIn) else value for name, value in kwargs.items()}
    kept = {name: value for name, value in kwargs.items() if name not in ("forward_context", "hidden_states")}
    return args, kwargs, LayerCall(kept, args[1:], mask)


def _traced_call(module: nn.Module, query: torch.Tensor, kwargs: dict[str, Any], is_chosen: bool) -> TracedAttention:
    scaling, context = kwargs.get("scaling"), kwargs.get("forward_context")
    layer_idx = getattr(module, "layer_idx", None)
    chunk = 0
    if isinstance(context, ForwardContext) and isinstance(layer_idx, int):
        chunk = context.cache.shape(layer_idx).chunk
    return TracedAttention(
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        window=int(kwargs.get("sliding_window") or 0),
        chunk=chunk,
        softcap=float(kwargs.get("softcap") or 0.0),
        has_sinks=kwargs.get("s_aux") is not None,
        has_factors=kwargs.get("query_factors") is not None,
        is_sparse=is_chosen or kwargs.get("block_indices") is not None,
    )


@contextmanager
def _attention_named(model: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Let the model's modules find `function` as their attention, and stand-ins as masks."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_WATCHED, function)
    AttentionMaskInterface.register(_WATCHED, _stand_in)
    configs = {
        id(config): config for module in model.modules() if (config := getattr(module, "config", None)) is not None
    }
    ours = [config for config in configs.values() if getattr(config, "_attn_implementation", None) == ATTENTION_NAME]
    for config in ours:
        config._attn_implementation = _WATCHED
    try:
        yield
    finally:
        for config in ours:
            config._attn_implementation = ATTENTION_NAME


def failing_module(model: nn.Module, error: BaseException) -> str | None:
    """Return the innermost module of `model` in which an error came up, by name and class; None when it was outside of
    all.
    """
    names = {id(module): f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name}
    trace, found = error.__traceback__, None
    while trace is not None:
        found = names.get(id(trace.tb_frame.f_locals.get("self")), found)
        trace = trace.tb_next
    return found


def check_calls(model: nn.Module, calls: list[LayerCall], max_len: int, shapes: list[LayerShape]) -> None:
    """Refuse what the cache cannot hold: attention twice in a layer or none, a window that only the mask knows.

    max_len: most positions of a sequence. shapes: of the cache. Raises UnsupportedError that names the layer.
    """
    compared = set[tuple[int, int, int]]()  # masks, which many layers share, and bounds: one look is enough
    for index, (layer, call) in enumerate(zip(decoder_layers(model), calls, strict=True)):
        attention = getattr(layer, "self_attn", None)
        if len(call.attention) > 1:
            raise UnsupportedError(
                f"layer {index} ({type(layer).__name__}) calls attention {len(call.attention)} times in a step; its "
                "keys and values would overwrite each other, so this model cannot run"
            )
        keeps_something = shapes[index].has_pages or shapes[index].state is not None
        if not call.reads and keeps_something:
            raise UnsupportedError(
                f"layer {index} ({type(layer).__name__}) attends by code of its own, which no cache and no sequence's "
                "bounds reach, so its answers would be wrong; its model has to call transformers' attention interface"
            )
        asked = call.attention[0] if call.attention else None
        window, chunk = (_window_of(attention), 0) if asked is None else (asked.window, asked.chunk)
        mask = call.mask if shapes[index].has_pages else None  # some models hand one to every layer
        if mask is not None and (id(mask), window, chunk) not in compared:
            compared.add((id(mask), window, chunk))
            _check_mask(f"layer {index} ({type(layer).__name__})", mask, (window, chunk), max_len)


def _window_of(attention: object) -> int:
    """Of an operator that asks no attention function."""
    if isinstance(attention, KCompressedAttention):
        return attention.window
    spec = attention.spec if isinstance(attention, KAttention | KMLAAttention) else None
    return 0 if spec is None else spec.window


def _check_mask(what: str, mask: MaskFunction, bounds: tuple[int, int], max_len: int) -> None:
    """Compare the mask with causal attention within `bounds`, seen from the last two of `max_len` positions.

    bounds: window and chunk, as an TracedAttention has them.
    """
    window, chunk = bounds
    zero = torch.zeros((), dtype=torch.int64)
    for last in {max_len - 1, max(max_len - 2, 0)}:
        keys = torch.arange(max_len)
        seen = torch.as_tensor(mask(zero, zero, torch.tensor(last), keys)).expand(max_len)
        back = last - keys
        expected = (back >= 0) & ((back < window) if window else True)
        if chunk:
            expected &= keys // chunk == last // chunk
        if torch.equal(seen.bool(), expected):
            continue
        wrong = back[seen.bool() != expected]
        nearest = int(wrong.abs().min())
        raise UnsupportedError(
            f"{what}: the model's mask and its attention differ from {nearest} positions back, which is not supported"
            + (f"; --cache_lens {nearest} keeps sequences shorter than that" if nearest > 0 else "")
        )
