"""Decoder layers that run in two native calls instead of a dozen modules.

Python and torch cost more than the kernels once a step carries one token: about 0.3 ms a layer. A layer whose parts
are all operators of ours, arranged as in Llama and Qwen (norm, attention, add, norm, feed-forward, add), is computed
part by part in native code. Whether a layer is arranged so is found by computing it both ways on random rows behind a
history longer than its window, layer by layer; parts that do not fit, or compute something else, keep their modules.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from ktransformers.cache.paged import LayerShape
from ktransformers.errors import KTransformersError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.cpu.latent import LatentLayer, LatentParts
from ktransformers.kernels.cpu.layer import (
    AttentionLayer,
    AttentionStep,
    DeltaNetWeights,
    GatedMlp,
    LayerBuffers,
    LayerKv,
    MlpLayer,
    MoeLayer,
    Norm,
    Projection,
    RecurrentLayer,
    SharedExperts,
)
from ktransformers.kernels.types import RawTensor
from ktransformers.operators.activation import KActivation
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.base import layer_number
from ktransformers.operators.comparison import close
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.experts.block import KMoEBlock
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from ktransformers.operators.layers.streams import streams_layer
from ktransformers.operators.layers.traced import (
    PROBE_ROWS,
    LayerCall,
    keep_attention_type,
    layer_list,
    probe_context,
)
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.linear.mlp import KMLP
from ktransformers.operators.linear.tiled import TiledInput
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.activation import recognize_activation
from ktransformers.operators.recognize.probe import ProbeInputs
from ktransformers.operators.recurrent.delta import KGatedDeltaNet
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["FusedLayer", "fuse_layers"]

logger = logging.getLogger(__name__)

_PROBE_BYTES = 256 * 2**20
"""Most of a probe's keys and values: windows that are longer than these hold are taken at their word."""
_TOLERANCE, _TOLERANCE_BF16 = 1e-4, 5e-3
"""Of the largest value: both ways differ by rounding of rotations and sums only, a wrong formula by much more. Where
activations are rounded to bf16, a difference in the last bit may become one of 2^-8 in one of them."""


_MIXERS = ("self_attn", "linear_attn")


class _DoesNotFit(Exception):
    """A part of a layer is not what the native call computes."""


def _inner(module: nn.Module) -> nn.Module:
    """The module of `transformers` that an operator wraps."""
    return module.inner if isinstance(module, WrapperOperator) else module


def layer_of(layer: nn.Module) -> int:
    """Return the number of a decoder layer in the model."""
    return layer_number(_inner(layer.get_submodule(mixer_of(layer))))


def mixer_of(layer: nn.Module) -> str:
    """Return the name of the part of a layer that brings positions together."""
    return next(name for name in _MIXERS if _child(layer, name) is not None)


def _child(module: nn.Module, name: str) -> nn.Module | None:
    return module._modules.get(name)


def _norm(module: object) -> Norm:
    if not isinstance(module, KRMSNorm) or module.spec is None:
        raise _DoesNotFit(f"{type(module).__name__} is not a native RMSNorm")
    return Norm(module.weight, module.spec.eps)


def _projection(module: object) -> Projection:
    native = module.native if isinstance(module, KTransformersLinear) else None
    if native is None:
        raise _DoesNotFit(f"{type(module).__name__} is not a native linear layer")
    return Projection(*native)


def _attention(layer: nn.Module, call: LayerCall) -> AttentionLayer:
    module = _inner(layer.get_submodule(mixer_of(layer)))
    head_norms = [_child(module, name) for name in ("q_norm", "k_norm")]
    heads = [None if norm is None else _norm(norm) for norm in head_norms]
    q, k, v, o = (_projection(_child(module, name)) for name in ("q_proj", "k_proj", "v_proj", "o_proj"))
    asked = call.attention[0] if len(call.attention) == 1 else None
    if asked is None or asked.has_sinks or asked.softcap or asked.chunk or asked.has_factors or asked.is_sparse:
        raise _DoesNotFit("another kind of attention")
    angles, head_dim = call.kwargs.get("position_embeddings"), getattr(module, "head_dim", None)
    if not isinstance(head_dim, int):
        raise _DoesNotFit("heads of no size")
    if not (isinstance(angles, tuple) and len(angles) == 2 and angles[0].dtype is torch.float32):
        raise _DoesNotFit("a rotation of its own")
    try:
        return AttentionLayer(
            (_norm(_child(layer, "input_layernorm")), heads[0], heads[1]),
            (q, k, v, o),
            head_dim,
            int(angles[0].shape[-1]),
            call.attention[0].scale,
            call.attention[0].window,
            layer_of(layer),
        )
    except ValueError as error:
        raise _DoesNotFit(str(error)) from error


def _latent(layer: nn.Module, operator: KMLAAttention, call: LayerCall) -> LatentLayer:
    inner, spec = operator.inner, operator.spec
    if not operator.is_native_on_cpu() or spec.window or spec.has_sinks or spec.hands_selection:
        raise _DoesNotFit("another kind of latent attention")
    assert operator.k_b is not None, "a layer that is not loaded"
    assert operator.v_b is not None, "a layer that is not loaded"
    is_compressed = _child(inner, "q_a_proj") is not None
    parts = LatentParts(
        _norm(_child(layer, "input_layernorm")),
        _projection(_child(inner, "q_b_proj" if is_compressed else "q_proj")),
        _projection(_child(inner, "kv_a_proj_with_mqa")),
        _projection(_child(inner, "o_proj")),
        operator.k_b,
        operator.v_b,
        _norm(_child(inner, "kv_a_layernorm")),
        _norm(_child(inner, "k_rope_only_layernorm")) if spec.has_rope_norm else None,
        _projection(_child(inner, "q_a_proj")) if is_compressed else None,
        _norm(_child(inner, "q_a_layernorm")) if is_compressed else None,
    )
    try:
        return LatentLayer(
            parts,
            operator.rope_dim,
            spec.scale,
            spec.latent_scale,
            is_interleaved=operator.rotates_neighbours(call.kwargs.get("position_embeddings")),
            layer=operator.layer,
        )
    except (TypeError, ValueError) as error:
        raise _DoesNotFit(str(error)) from error


def _delta_net(layer: nn.Module, operator: KGatedDeltaNet) -> RecurrentLayer:
    inner: Any = operator.inner
    names = ("qkvz", "ba") if operator.is_interleaved else ("qkv", "z", "b", "a")
    output = inner.out_proj
    is_tiled = isinstance(output, TiledInput) and (output.key_heads, output.run) == (operator.k_heads, operator.v_dim)
    net = DeltaNetWeights(
        operator.k_heads,
        operator.v_heads,
        operator.k_dim,
        operator.v_dim,
        inner.conv1d.weight[:, 0].contiguous(),
        operator.a,
        inner.dt_bias,
        Norm(inner.norm.weight, float(inner.norm.variance_epsilon)),
        operator.gate,
        is_tiled=is_tiled,
    )
    if inner.conv1d.bias is not None:
        raise _DoesNotFit("a convolution with a bias")
    try:
        return RecurrentLayer(
            _norm(_child(layer, "input_layernorm")),
            tuple(_projection(_child(inner, f"in_proj_{name}")) for name in names),
            _projection(output.linear if is_tiled else output),
            net,
            operator.layer,
        )
    except (TypeError, ValueError) as error:
        raise _DoesNotFit(str(error)) from error


Mixer = AttentionLayer | LatentLayer | RecurrentLayer


def _mixing(layer: nn.Module, call: LayerCall) -> Mixer:
    mixer = layer.get_submodule(mixer_of(layer))
    if isinstance(mixer, KMLAAttention):
        return _latent(layer, mixer, call)
    return _delta_net(layer, mixer) if isinstance(mixer, KGatedDeltaNet) else _attention(layer, call)


def _moe(layer: nn.Module, block: KMoEBlock) -> MoeLayer:
    router, experts = _child(block.inner, "gate"), _child(block.inner, "experts")
    if not isinstance(router, KRouter) or router.spec is None or router.logit_bias is not None:
        raise _DoesNotFit("a router of its own")
    if not isinstance(experts, KTransformersExperts) or experts.kernel is None:
        raise _DoesNotFit("experts that run on torch")
    weight = RawTensor.from_tensor(router.weight)
    norm, shared = _norm(_child(layer, "post_attention_layernorm")), _shared_experts(block.inner)
    return MoeLayer(norm, weight, router.spec, experts.kernel, router.bias, shared, layer_of(layer))


def _shared_experts(block: nn.Module) -> SharedExperts | None:
    several, one = (_child(block, name) for name in ("shared_experts", "shared_expert"))
    if several is not None:
        return SharedExperts(_gated_mlp(several))
    if one is None:
        return None
    score = _projection(_child(block, "shared_expert_gate"))
    if score.bias is not None:
        raise _DoesNotFit("a score with a bias")
    return SharedExperts(_gated_mlp(one), score.weight)


def _gated_mlp(module: nn.Module) -> GatedMlp:
    inner = module.inner if isinstance(module, KMLP) else module
    if {name for name, _ in inner.named_children()} != KMLP.PARTS:
        raise _DoesNotFit("not gate, up and down")
    act_fn = inner.get_submodule("act_fn")
    activation = act_fn.spec if isinstance(act_fn, KActivation) else recognize_activation(act_fn)
    parts = [_projection(_child(inner, name)) for name in ("gate_proj", "up_proj", "down_proj")]
    if activation is None or any(part.bias is not None for part in parts):
        raise _DoesNotFit("biases, or an activation of its own")
    gate, up, down = (part.weight for part in parts)
    return GatedMlp(gate, up, down, activation)


class FusedLayer(nn.Module):
    """Stands in for a decoder layer of `transformers`: hidden_states fp32 [1, T, H] in and out, changed in place.

    attention, feed_forward: the native parts; where one is None the layer's own modules run.
    """

    def __init__(
        self,
        layer: nn.Module,
        pool: WorkerPool,
        buffers: LayerBuffers,
        attention: Mixer | None,
        feed_forward: MoeLayer | MlpLayer | None,
    ):
        super().__init__()
        self.inner, self.pool, self.memory = layer, pool, buffers
        self.attention, self.feed_forward = attention, feed_forward
        self.mixer = mixer_of(layer)
        self.layer_idx = int(_inner(layer.get_submodule(self.mixer)).layer_idx)  # type: ignore[arg-type]
        keep_attention_type(self, layer)

    @property
    def is_native(self) -> bool:
        """Whether the layer runs in native calls alone, and none of its modules runs."""
        return self.attention is not None and self.feed_forward is not None

    @override
    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not self.is_native or _sees_ahead(kwargs["forward_context"]):
            return self._forward(hidden_states, *args, **kwargs)
        with torch._C.DisableTorchFunction():  # see kernels/untraced.py
            return self._forward(hidden_states, *args, **kwargs)

    def _forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
        self._attend(rows, hidden_states.shape, args, kwargs)
        if self.feed_forward is not None:
            self.feed_forward.forward(rows, self.pool, self.memory)
        else:
            layer: Any = self.inner
            rows += layer.mlp(layer.post_attention_layernorm(rows[None]))[0]
        return rows.view(hidden_states.shape)

    def _attend(self, rows: torch.Tensor, shape: torch.Size, args: Any, kwargs: dict[str, Any]) -> None:
        layer: Any = self.inner
        context: ForwardContext = kwargs["forward_context"]
        if self.attention is None or _sees_ahead(context):
            normed = layer.input_layernorm(rows.view(shape))
            mixed = layer.get_submodule(self.mixer)(*args, hidden_states=normed, **kwargs)
            rows += (mixed[0] if isinstance(mixed, tuple) else mixed).reshape(rows.shape)
            return
        if isinstance(self.attention, RecurrentLayer):
            states = context.cache.states
            assert states is not None, "a cache without states"
            assert context.states is not None, "a step without states"
            parts = states.layer(self.layer_idx)
            self.attention.forward(rows, parts["conv"], parts["recurrent"], context.states, self.pool, self.memory)
            return
        kept, index = context.cache, self.layer_idx
        cache = LayerKv(*kept.layer(index), kept.scales(index), kept.shape(index).bf16_products)
        self.attention.forward(rows, cache, self.attention_step(context, kwargs), self.pool, self.memory)

    def attention_step(self, context: ForwardContext, kwargs: dict[str, Any]) -> AttentionStep:
        """Return the attention's rows and angles of a step, shared by layers that are given the same angles."""
        if isinstance(self.attention, LatentLayer):
            return _latent_step(self.inner.get_submodule(self.mixer), context, kwargs.get("position_embeddings"))
        cos, sin = kwargs["position_embeddings"]
        return context.derived("attention step", cos, lambda cos: _attention_step(context, cos, sin))


def _sees_ahead(context: ForwardContext) -> bool:
    """Whether rows see what is behind them, which native attention does not compute."""
    return context.pictures is not None and context.pictures.ends is not None


def _attention_step(context: ForwardContext, cos: torch.Tensor, sin: torch.Tensor) -> AttentionStep:
    """cos, sin: [1, T, D_rot]."""
    return AttentionStep(cos[0], sin[0], context.slot_mapping, context.pages)


def _latent_step(operator: nn.Module, context: ForwardContext, angles: Any) -> AttentionStep:
    """angles: as the model hands them to its layers."""
    assert isinstance(operator, KMLAAttention)
    given = angles[0] if isinstance(angles, tuple) else context.kv_lens if angles is None else angles

    def step(_: torch.Tensor) -> AttentionStep:
        cos, sin = operator.angles(angles, context)[:2]
        return _attention_step(context, cos.contiguous()[None], sin.contiguous()[None])

    return context.derived("latent attention step", given, step)


def _native_parts(layer: nn.Module, call: LayerCall) -> tuple[Mixer | None, MoeLayer | MlpLayer | None]:
    """What native calls may compute of a layer, attention and feed-forward."""
    attention: Mixer | None = None
    feed_forward: MoeLayer | MlpLayer | None = None
    names = {name for name, _ in layer.named_children()}
    if names not in [{mixer, "mlp", "input_layernorm", "post_attention_layernorm"} for mixer in _MIXERS]:
        return None, None
    try:
        attention = _mixing(layer, call)
    except (_DoesNotFit, AttributeError) as error:
        logger.debug("layer %s keeps its attention module: %s", type(layer).__name__, error)
    mlp = layer.get_submodule("mlp")
    try:
        if isinstance(mlp, KMoEBlock):
            feed_forward = _moe(layer, mlp)
        else:
            feed_forward = MlpLayer(_norm(_child(layer, "post_attention_layernorm")), _gated_mlp(mlp), layer_of(layer))
    except (_DoesNotFit, AttributeError, ValueError) as error:
        logger.debug("layer %s keeps its feed-forward module: %s", type(layer).__name__, error)
    return attention, feed_forward


def _fused(
    layer: nn.Module, call: LayerCall, shape: LayerShape, pool: WorkerPool, buffers: LayerBuffers
) -> FusedLayer | None:
    """The layer with most native parts that gives what its modules give; None when there is none."""
    attention, feed_forward = _native_parts(layer, call)
    ways = dict.fromkeys([(attention, feed_forward), (None, feed_forward), (attention, None)])  # none twice
    ways.pop((None, None), None)
    reason = "the results differ"
    for parts in ways:
        fused = FusedLayer(layer, pool, buffers, *parts)
        try:
            agrees = _agrees(fused, call, shape, pool)
        except ReadError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, KTransformersError) as error:
            agrees, reason = False, str(error)
        if agrees:
            return fused
        what = " and ".join(type(part).__name__ for part in parts if part is not None)
        logger.info("layer %d (%s) is not computed by %s: %s", layer_of(layer), type(layer).__name__, what, reason)
    return None


def _agrees(fused: FusedLayer, call: LayerCall, shape: LayerShape, pool: WorkerPool) -> bool:
    """Whether the fused layer and the modules give the same on random rows behind a random history."""
    layer = fused.inner
    hidden = layer.get_parameter("input_layernorm.weight").shape[0]
    rows = ProbeInputs().normal(1, PROBE_ROWS, hidden)
    window = max((asked.window for asked in call.attention), default=0)
    past = min(window + 2, _PROBE_BYTES // max(shape.read_nbytes(1), 1))
    shapes, results = [LayerShape.without_pages()] * fused.layer_idx + [replace(shape, shares=None)], []
    for way in (layer, fused):
        context = probe_context(shapes, pool, PROBE_ROWS, past)
        results.append(way(rows.clone(), *call.args, **{**call.kwargs, "forward_context": context}))
    want, got = results
    if not isinstance(want, torch.Tensor):  # a tuple: the model's loop expects one
        return False
    return close(got, want, of_largest=_TOLERANCE_BF16 if pool.has_bf16 else _TOLERANCE)


@torch.inference_mode()
def fuse_layers(model: nn.Module, shapes: list[LayerShape], pool: WorkerPool, calls: list[LayerCall]) -> int:
    """Put FusedLayers in the places of the decoder layers that allow it; returns how many.

    model: a loaded causal LM of `transformers`. shapes: of the cache, layer by layer. calls: of its layers in a step of
    PROBE_ROWS rows.
    """
    layers = layer_list(model)
    if layers is None:
        return 0
    buffers, count = LayerBuffers(), 0
    for i, (layer, call) in enumerate(zip(list(layers), calls, strict=True)):
        fused = streams_layer(layer, call, shapes[: i + 1], pool) or _fused(layer, call, shapes[i], pool, buffers)
        if fused is None:
            continue
        layers[i] = fused
        count += 1
    logger.debug("%d of %d decoder layers run in native calls", count, len(layers))
    return count
