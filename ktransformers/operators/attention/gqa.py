"""Grouped-query attention over the cache, for every family whose attention goes through `AttentionInterface`.

The Hugging Face module projects, normalizes and rotates; this function writes keys and values to their slots and
attends. It is registered with the attention interface and not with the mask interface, so that the model hands over
no mask: what a row may see follows from the ForwardContext.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.cache.paged import LayerShape
from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.flashinfer import Shape
from ktransformers.kernels.triton.attention.paged import attention
from ktransformers.kernels.triton.attention.rope import KvSlots, Rotation, rope_to_cache
from ktransformers.models.facts import LayerFacts, LayerKind
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.gqa_gpu import GpuCache, GqaParts, gqa_forward
from ktransformers.operators.attention.indexer import ChoiceMask, KPooledIndexer, PendingChoice
from ktransformers.operators.attention.pictures import attend_pictures
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import OperatorRuntime
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import use
from ktransformers.operators.recognize.attention import recognize_attention, recognize_temperature
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["ATTENTION_NAME", "AttentionOptions", "KAttention", "attention_forward", "register_attention"]

logger = logging.getLogger(__name__)

ATTENTION_NAME = "ktransformers"

# What transformers passes along that does not change the result of causal attention over a cache.
_NEUTRAL_KWARGS = frozenset(
    {"position_ids", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "cache_position",
     "is_causal", "return_dict", "logits_to_keep", "position_embeddings", "attention_mask", "num_items_in_batch"}
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """Keyword arguments that modules of transformers pass to attention.

    scaling: of dot products; None: the head's size to the power -0.5. softcap bounds the logits (Gemma 2). s_aux [Hq]
    are attention sinks. query_factors [T] multiply queries (Llama 4). block_indices: what a KBlockIndexer made.
    """

    scaling: float | None = None
    dropout: float = 0.0
    sliding_window: int | None = None
    softcap: float | None = None
    s_aux: torch.Tensor | None = None
    query_factors: torch.Tensor | None = None
    block_indices: PendingChoice | ChoiceMask | None = None
    forward_context: ForwardContext | None = None

    @classmethod
    def of(cls, module: nn.Module, given: Mapping[str, Any]) -> AttentionOptions:
        """Read what `module` passes by keyword. Raises UnsupportedError for what would change the result."""
        options = cls(**{name: given[name] for name in _OPTIONS & given.keys()})
        unknown = sorted(name for name in given.keys() - _OPTIONS - _NEUTRAL_KWARGS if given[name] is not None)
        if unknown or options.dropout:
            what = ", ".join(unknown) or "dropout"
            raise UnsupportedError(f"{type(module).__name__} passes {what} to attention, which is not supported")
        return options

    def of_call(self, module: nn.Module, shape: LayerShape) -> dict[str, Any]:
        """Return the fields of an AttentionCall. Raises UnsupportedError for a window within chunks."""
        if shape.chunk and self.sliding_window:
            raise UnsupportedError(
                f"{type(module).__name__} has a window within chunks of positions, which is not supported"
            )
        return {
            "window": shape.chunk or self.sliding_window or 0,
            "is_chunked": bool(shape.chunk),
            "sinks": None if self.s_aux is None else self.s_aux.float().contiguous(),
            "softcap": self.softcap or 0.0,
        }


_OPTIONS = frozenset(field.name for field in fields(AttentionOptions))


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | ChoiceMask | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Write the step's keys and values to the cache, then attend, called as transformers calls attention.

    query [1, Hq, T, D]; key, value [1, Hkv, T, D]; returns [1, T, Hq, D]; all fp32, or of a GPU's type.
    attention_mask: what a KPooledIndexer made, or None. kwargs: see AttentionOptions. Raises UnsupportedError for an
    argument that would change the result.
    """
    given = AttentionOptions.of(module, kwargs)
    chosen = given.block_indices
    if isinstance(attention_mask, ChoiceMask):
        chosen, attention_mask = attention_mask, None
    context = _checked(module, given.forward_context, attention_mask)
    if given.query_factors is not None:
        query = (query * given.query_factors[:, None]).to(query.dtype)
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    keys, values = context.cache.layer(layer_idx)
    shape, scales = context.cache.shape(layer_idx), context.cache.scales(layer_idx)
    options = given.of_call(module, shape)
    context = context.on(keys.device)
    topk_positions = _selection(module, chosen, context, options)
    # [T, heads, D]; keys and values that another layer made may be on that one's device
    rows = query[0].transpose(0, 1), _here(key, query), _here(value, query)
    is_on_gpu = context.cache.is_on_gpu(layer_idx)
    scale = query.shape[-1] ** -0.5 if given.scaling is None else float(given.scaling)
    q = rows[0] if is_on_gpu else rows[0].contiguous()
    call = AttentionCall(q, keys, values, context.pages, scale, scales=scales, **options)
    if is_on_gpu:
        kept = GpuCache.of(context.cache, layer_idx)
        return _gpu_attention(rows, kept, context, call, topk_positions, is_borrowed=shape.is_borrowed)[None], None
    if shape.is_own:
        for made, cache, of in ((rows[1], keys, scales[0]), (rows[2], values, scales[1])):
            cpu.write_kv(made, context.slot_mapping, cache, of, context.pool)
    attend = partial(cpu.attention, pool=context.pool, bf16_products=shape.bf16_products)
    return _attended(call, context, topk_positions, attend)[None], None


def _checked(
    module: nn.Module, forward_context: ForwardContext | None, attention_mask: torch.Tensor | None
) -> ForwardContext:
    """The step's context. Raises UnsupportedError where there is none, or a mask."""
    if forward_context is None:
        raise UnsupportedError(
            f"{type(module).__name__} is given no forward_context: it runs outside of the engine, or its model does "
            "not hand keyword arguments down to attention, which every supported family does"
        )
    if attention_mask is not None:
        raise UnsupportedError(f"{type(module).__name__} passes attention_mask to attention, which is not supported")
    if _is_tempered(module):
        raise UnsupportedError(
            f"{type(module).__name__} scales queries by positions that it counts from 0 in every step; a rule with "
            "KAttention for it counts them right"
        )
    return forward_context


def _here(states: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    return states[0].transpose(0, 1).to(query.device, query.dtype)


def _selection(
    module: Any, block_indices: object, context: ForwardContext, options: dict[str, Any]
) -> TopkPositions | None:
    """What rows and KV heads attend to, by an indexer; None: all positions."""
    if block_indices is None:
        return None
    if isinstance(block_indices, ChoiceMask):
        return block_indices.topk_positions
    if not isinstance(block_indices, PendingChoice):
        raise UnsupportedError(
            f"{type(module).__name__} has an indexer that chooses what is attended to: add a rule with class "
            "KBlockIndexer for it, as MiniMaxM3.yaml has, or attend to everything with --sparse_attention off"
        )
    if options["window"] or options["softcap"] or options["sinks"] is not None:
        raise UnsupportedError(f"{type(module).__name__}: chosen blocks go with no window, softcap or sinks")
    return block_indices.choose(context, int(module.layer_idx))


def _attended(
    call: AttentionCall,
    context: ForwardContext,
    topk_positions: TopkPositions | None,
    attend: Callable[[AttentionCall], torch.Tensor],
) -> torch.Tensor:
    """`attend` to all positions, or to those that were chosen for rows or for each KV head of a row: [T, Hq, Dv].

    Where they were for each KV head, a row and a KV head become a row of its own, a slot and a KV head a slot. What was
    chosen goes with no window, softcap or sinks.
    """
    if topk_positions is None:
        return attend_pictures(call, context, attend)
    num_rows, num_heads, dim = call.q.shape
    kv_heads, dim_v = call.v_cache.shape[1:]
    if len(topk_positions.counts) == num_rows:
        caches = call.k_cache, call.v_cache
        return attend(AttentionCall(call.q, *caches, topk_positions.pages, call.scale, scales=call.scales))
    if len(topk_positions.counts) != num_rows * kv_heads:
        raise UnsupportedError(f"an indexer of {len(topk_positions.counts) // num_rows} heads for {kv_heads} KV heads")
    heads = torch.arange(kv_heads, dtype=torch.int32, device=call.q.device).repeat(num_rows)
    chosen = replace(topk_positions, slots=topk_positions.slots * kv_heads + heads[:, None])
    rows = call.q.reshape(num_rows * kv_heads, num_heads // kv_heads, dim)
    caches = call.k_cache.view(-1, 1, dim), call.v_cache.view(-1, 1, dim_v)
    of_keys, of_values = (None if of is None else of.view(-1, 1, 1) for of in call.scales)
    out = attend(AttentionCall(rows, *caches, chosen.pages, call.scale, scales=(of_keys, of_values)))
    return out.view(num_rows, num_heads, dim_v)


@functools.cache
def _zero_angle(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(1, 1, device=device), torch.zeros(1, 1, device=device)


def _gpu_attention(
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    cache: GpuCache,
    context: ForwardContext,
    call: AttentionCall,
    topk_positions: TopkPositions | None,
    *,
    is_borrowed: bool,
) -> torch.Tensor:
    """`attention_forward` on a GPU: rows are query, key and value [T, heads, D] of any type; returns [T, Hq, D].
    is_borrowed: key and value are nothing, the cache is read alone."""
    device = cache.keys.device
    use(device)
    num_rows = rows[0].shape[0]
    is_quantized = cache.quantized_attention and topk_positions is None
    attend = partial(attention, quantized_attention=is_quantized)
    if is_borrowed:
        return _attended(replace(call, q=rows[0].to(cache.row_dtype).contiguous()), context, topk_positions, attend)
    # One kernel writes the cache and makes queries of its rows' type. What is rotated here is rotated already: by 0.
    cos, sin = _zero_angle(device)
    query = rope_to_cache(
        rows,
        Rotation(cos.expand(num_rows, 1), sin.expand(num_rows, 1), rotary_dim=2),
        KvSlots(cache.keys, cache.values, context.slot_mapping, cache.scales),
        q_out=torch.empty(rows[0].shape, dtype=cache.row_dtype, device=device),
    )
    return _attended(replace(call, q=query), context, topk_positions, attend)


def register_attention() -> None:
    """Make "ktransformers" a valid `attn_implementation`. Safe to call again."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, attention_forward)


def _is_tempered(module: nn.Module) -> bool:
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


@functools.cache
def _log_expanded(kind: str) -> None:
    """Once for a kind of module, not for every layer."""
    logger.warning(
        "%s is latent attention: KAttention caches its keys and values expanded, which takes many times the memory; "
        "KDeepseekV2Attention (KMLAAttention) caches the latent",
        kind,
    )


class KAttention(WrapperOperator):
    """Attention module of any GQA family: its own forward on our cache and kernels.

    Works without a rule too, because the attention function is chosen for the whole model; the rule gives the
    module its line in the plan and its device. Latent attention works, expanded, and a warning says so.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KAttentionNative": "native attention over the cache",
        "KAttentionFused": "norms, rotation and cache write in one Triton kernel, attention in others",
        "KAttentionTriton": "Triton attention over the cache",
    }

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if getattr(self.inner, "kv_lora_rank", None) is not None:
            _log_expanded(type(self.inner).__name__)
        self.spec = recognize_attention(self.inner) if self.device.is_gpu and not self._has_chunks() else None
        self._parts: GqaParts | None = None  # on a GPU, once bound
        self.can_be_sparse = getattr(self.inner, "indexer", None) is not None
        self._has_pools = hasattr(getattr(self.inner, "indexer", None), "compress_ratio")
        if self._has_pools:
            self.spec = None
        self._is_borrowing = self._facts is not None and self._facts.is_borrowing
        self._temperature = recognize_temperature(self.inner) if _is_tempered(self.inner) else None
        self._factors: torch.Tensor | None = None  # by position, once bound
        if self._temperature is not None:
            self.spec = None
            self.inner.attn_temperature_tuning = False  # type: ignore[assignment]  # it is done here

    @property
    def _facts(self) -> LayerFacts | None:
        layers, layer_idx = self.config.facts.layers, getattr(self.inner, "layer_idx", None)
        return layers[layer_idx] if isinstance(layer_idx, int) and layer_idx < len(layers) else None

    def _has_chunks(self) -> bool:
        return self._facts is not None and self._facts.kind is LayerKind.CHUNKED

    def attention_shape(self) -> Shape | None:
        """Return the shape for which FlashInfer is asked; None where another kernel has to attend."""
        return None if self.spec is None else self.spec.shape(self.device.dtype)

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        if self._has_pools and not isinstance(self.inner.get_submodule("indexer"), KPooledIndexer):
            raise UnsupportedError(
                f"{self.key}.indexer chooses what is attended to: add a rule with class KPooledIndexer for it, as "
                "Qwen4Exp.yaml has"
            )
        if self._temperature is not None:
            positions = torch.arange(runtime.max_len, dtype=torch.float64)
            self._factors = self.device.move(self._temperature.of(positions).float())
        if self.spec is not None:
            self._parts = GqaParts.of(self.inner, self.spec, self.device, runtime.find(FlashLayer))

    @override
    def op(self, phase: Phase) -> str:
        if self.spec is not None:
            return "KAttentionFused"
        return "KAttentionTriton" if self.device.is_gpu else "KAttentionNative"

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context, angles = kwargs.get("forward_context"), kwargs.get("position_embeddings")
        if self._factors is not None and isinstance(context, ForwardContext):
            positions = context.on(self._factors.device).kv_lens.to(torch.int64) - 1
            kwargs["query_factors"] = self._factors[positions]
        if self._is_borrowing:  # in the place of keys and values that an earlier layer would have made
            nothing = kwargs["hidden_states"].new_empty(1, 0, 0, 0)
            kwargs["shared_kv_states"] = {self.inner.layer_type: (nothing, nothing)}
        if self._has_pools and isinstance(context, ForwardContext):
            kwargs["attention_mask"] = ChoiceMask(context)
        if self._parts is None or context is None or not isinstance(angles, tuple) or args:
            return self.inner(*args, **kwargs)
        if kwargs.get("attention_mask") is not None:
            raise UnsupportedError(f"{self.key}: attention over the cache takes no mask")
        return gqa_forward(self._parts, kwargs["hidden_states"], angles, context), None
