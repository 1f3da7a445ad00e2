"""Decoder layers over several streams of hidden states, whose results one native call mixes with the streams.

    streams [T, N, H] ── collapsed (KHyperConnection) ── norm ── attention or feed-forward ── mixed with the streams

torch does the mixing in several passes over all streams, on one thread.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.cache.paged import LayerShape
from ktransformers.errors import KTransformersError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.comparison import close
from ktransformers.operators.exact import modules_on_torch
from ktransformers.operators.layers.hyper import KHyperConnection
from ktransformers.operators.layers.traced import PROBE_ROWS, LayerCall, keep_attention_type, probe_context
from ktransformers.operators.recognize.probe import ProbeInputs
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["StreamsLayer", "streams_layer"]

logger = logging.getLogger(__name__)

_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm", "attn_hc", "ffn_hc"}
_HOOKS = [f"_forward_{name}" for name in ("pre_hooks", "pre_hooks_with_kwargs", "hooks", "hooks_with_kwargs")]
_HOOKS += ["_forward_hooks_always_called"]
_TOLERANCE = 5e-3  # of the largest value: what differs in its last bit may be rounded to another number of 8 bits


class StreamsLayer(nn.Module):
    """Stands in for a decoder layer of `transformers`: streams fp32 [1, T, N, H] in and out, changed in place.

    returns_choice: whether the layer returns what its attention chose, too. is_native: no module inside of it keeps
    torch's code, but where it turns NativeMathMode on.
    """

    def __init__(self, layer: nn.Module, pool: WorkerPool, returns_choice: bool):
        super().__init__()
        self.inner, self.pool, self.returns_choice = layer, pool, returns_choice
        mlp = layer.get_submodule("mlp")
        inner = mlp.inner if isinstance(mlp, WrapperOperator) else mlp
        self.looks_up_ids = "input_ids" in inspect.signature(inner.forward).parameters
        self.is_native = not modules_on_torch(layer)
        for hooks in _HOOKS:  # which pass a step's context, or give a draft's streams their dimension
            setattr(self, hooks, getattr(layer, hooks))
        keep_attention_type(self, layer)

    @override
    def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: Any) -> object:
        if not self.is_native:
            return self._forward(hidden_states, *args, **kwargs)
        with torch._C.DisableTorchFunction():  # see kernels/untraced.py
            return self._forward(hidden_states, *args, **kwargs)

    def _forward(
        self, hidden_states: torch.Tensor, *args: object, input_ids: torch.Tensor | None = None, **kwargs: object
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        layer: Any = self.inner
        streams = hidden_states[0].contiguous()
        post, comb, collapsed = layer.attn_hc(streams[None])
        mixed = layer.self_attn(*args, hidden_states=layer.input_layernorm(collapsed), **kwargs)
        parts = mixed if isinstance(mixed, tuple) else (mixed,)
        self._mix(streams, parts[0], post, comb)
        post, comb, collapsed = layer.ffn_hc(streams[None])
        ids = {"input_ids": input_ids} if self.looks_up_ids else {}
        self._mix(streams, layer.mlp(layer.post_attention_layernorm(collapsed), **ids), post, comb)
        choice = parts[2] if len(parts) > 2 else None
        return (streams[None], choice) if self.returns_choice else streams[None]

    def _mix(self, streams: torch.Tensor, result: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> None:
        rows = result.reshape(len(streams), -1).contiguous()
        cpu.mix_streams(streams, rows, post[0], comb[0], self.pool)


def streams_layer(layer: nn.Module, call: LayerCall, shapes: list[LayerShape], pool: WorkerPool) -> StreamsLayer | None:
    """Return what stands in for a layer and gives what its modules give; None when nothing does.

    shapes: of the cache, up to the layer. call: of the layer in a step of PROBE_ROWS rows.
    """
    connection = layer._modules.get("attn_hc")
    names = {name for name, _ in layer.named_children()}
    if names != _PARTS or not isinstance(connection, KHyperConnection) or connection.spec is None:
        return None
    hidden = layer.get_parameter("input_layernorm.weight").shape[0]
    rows = ProbeInputs().normal(1, PROBE_ROWS, connection.spec.streams, hidden)

    def run(way: nn.Module) -> tuple[object, ...]:
        context = probe_context(shapes, pool, PROBE_ROWS)
        got = way(rows.clone(), *call.args, **{**call.kwargs, "forward_context": context})
        return got if isinstance(got, tuple) else (got,)

    want, reason = run(layer), "the results differ"
    made = StreamsLayer(layer, pool, returns_choice=len(want) > 1)
    try:
        if all(map(_is_close, run(made), want)):
            return made
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, KTransformersError) as error:
        reason = str(error)
    logger.info("a layer (%s) mixes its streams in torch: %s", type(layer).__name__, reason)
    return None


def _is_close(got: object, want: object) -> bool:
    """Of what a layer returns: its streams, or what its attention chose, which is the same module's either way."""
    if isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor) and want.is_floating_point():
        return close(got, want, of_largest=_TOLERANCE)
    return type(got) is type(want)
