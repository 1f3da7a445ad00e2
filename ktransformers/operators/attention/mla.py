"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with the up-projections absorbed but for long prefills.

The cache stores per position the normalized latent and the rotated shared key, R + P values, never expanded keys.
A head's key up-projection k_b is applied to the query instead of to every cached position, its value up-projection
v_b to the attention's result:

    T rows, H heads, R kv_lora_rank, P rotary dimension, N non-rotary dimension, V value dimension

    scores[t, h, j] = (q_nope[t, h] k_b[h]) . latent[j] + q_rot[t, h] . k_rot[j]
    out[t, h]       = v_b[h] sum_j softmax(scores)[j] latent[j]

On a GPU prefill steps may expand a sequence's keys and values for the time of a layer, which takes fewer products where
many rows share them: operators/attention/latent_materialization.py says when.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn
from typing_extensions import override

from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.flashinfer import LatentShape, Shape
from ktransformers.kernels.triton.attention.rope import Rotation
from ktransformers.kernels.types import GroupType, RawTensor
from ktransformers.kernels.untraced import untraced
from ktransformers.operators.attention.flash import FlashLayer
from ktransformers.operators.attention.indexer import KIndexer, log_dense
from ktransformers.operators.attention.latent_gpu import GpuLatent, LatentStep, check_gpu_shape
from ktransformers.operators.attention.latent_materialization import LatentDims, MaterializationPolicy, Rates, StepRuns
from ktransformers.operators.attention.latent_spec import Gate, LatentSpec, masks_positions
from ktransformers.operators.attention.latent_weights import TWO_BYTE, split_up_projections
from ktransformers.operators.attention.topk_positions import TopkPositions
from ktransformers.operators.base import (
    OperatorConfig,
    OperatorRuntime,
    Placement,
    Requirements,
    expect_shape,
    layer_number,
)
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.exact import exact_math
from ktransformers.operators.linear.joined import JoinedLinears
from ktransformers.operators.linear.linear import KTransformersLinear
from ktransformers.operators.norm import KRMSNorm
from ktransformers.operators.recognize.norm import NormSpec, recognize_norm
from ktransformers.operators.rotation import real_parts, rotate
from ktransformers.operators.wrapper import DenseState, WrapperOperator
from ktransformers.weights.source import TensorInfo, WeightSource

__all__ = ["KMLAAttention", "rotate"]

logger = logging.getLogger(__name__)

_LEAST_ROTARY = 16
"""Columns behind the latent that a GPU's kernels want; of a family that has none they are 0."""


@functools.cache
def _log_absorbed() -> None:
    """Once, not for every layer."""
    logger.info("absorb_for_prefill: false has no effect on the CPU, where latent attention is absorbed in both phases")


class KMLAAttention(WrapperOperator):
    """Latent attention of the DeepSeek families: [1, T, hidden] in and out.

    absorb_for_prefill: how prefill steps on a GPU attend: True absorbed; False on expanded keys, where a sequence has
    more than one row; None as is faster for each sequence. On the CPU it is absorbed always.
    """

    OPS: ClassVar[dict[str, str]] = {
        "KMLANative": "absorbed projections and native attention over the latent cache",
        "KMLATriton": "Triton attention over the latent cache, absorbed or on expanded keys",
    }
    KWARGS: ClassVar[frozenset[str]] = frozenset({"absorb_for_prefill"})
    OWNED_CHILDREN: ClassVar[frozenset[str]] = frozenset({"kv_b_proj"})

    def __init__(
        self,
        module: nn.Module,
        key: str,
        config: OperatorConfig,
        placement: Placement | None = None,
        absorb_for_prefill: bool | None = None,
    ):
        super().__init__(module, key, config, placement)
        self.spec = spec = LatentSpec.of(module, key)
        self.rank, self.nope_dim, self.rope_dim = spec.rank, spec.nope_dim, spec.rope_dim
        self.v_dim, self.num_heads = spec.v_dim, spec.num_heads
        self.layer_idx: int = int(module.layer_idx)  # type: ignore[arg-type]
        self.layer = layer_number(module)
        self._compressions: JoinedLinears | None = None  # what reads hidden states: the query's and the latent's
        self._latent_norm: NormSpec | None = None  # on a GPU
        self._norm_weight: torch.Tensor | None = None  # of that norm, the latents' scale included
        self._query_norm: NormSpec | None = None  # of the compressed query, where a kernel computes it
        self._gpu: GpuLatent | None = None
        self._is_native: bool | None = None  # on the CPU, once it has run
        self.absorb_for_prefill = absorb_for_prefill
        self._flash: FlashLayer | None = None
        self._choice: MaterializationPolicy | None = None
        if absorb_for_prefill is False and not self.device.is_gpu:
            _log_absorbed()
        if self.device.is_gpu:
            self.rope_dim = spec.rope_dim or _LEAST_ROTARY
            check_gpu_shape(key, self.rank, self.rope_dim)
            self._latent_norm = recognize_norm(module.get_submodule("kv_a_layernorm"))
            if self._latent_norm is None or self._latent_norm.offset:
                raise UnsupportedError(f"{key}: its latent norm is not plain RMSNorm; place it on cpu")
        indexer: Any = getattr(module, "indexer", None)
        self.can_be_sparse = indexer is not None or spec.hands_selection
        self.is_sparse = self.can_be_sparse and config.sparse_attention != "off"
        if self.can_be_sparse and not self.is_sparse:
            log_dense()
        self._has_indexer = self.is_sparse and indexer is not None
        self.k_b: RawTensor | None = None  # [H, R, N]
        self.v_b: RawTensor | None = None  # [H, V, R]

    @override
    def state(self) -> DenseState:
        return DenseState(self.inner, self.key, self.device, torch.float32 if self.spec.has_sinks else None)

    def attention_shape(self) -> Shape | None:
        """Return the shape for which FlashInfer is asked; None where another kernel has to attend."""
        if not self.device.is_gpu or self.is_sparse or self.spec.window or self.spec.has_sinks:
            return None
        return LatentShape(self.num_heads, self.rank, self.rope_dim, self.device.dtype, self.spec.scale)

    def materialization_choice(self, flash: FlashLayer | None = None) -> MaterializationPolicy | None:
        """Return how prefill steps would choose between the two forms with `flash`; None where all are absorbed."""
        is_bound = flash is not None and flash.is_required
        if (
            not self.device.is_gpu
            or self.absorb_for_prefill
            or is_bound
            or self.is_sparse
            or self.spec.window
            or self.spec.has_sinks
        ):
            return None
        rates = Rates() if flash is None else Rates().with_flashinfer()
        dims = LatentDims(self.num_heads, self.rank, self.nope_dim, self.rope_dim, self.v_dim)
        return MaterializationPolicy(dims, self.device.dtype, rates, is_forced=self.absorb_for_prefill is False)

    @property
    def prefill_choice(self) -> MaterializationPolicy | None:
        """How prefill steps choose between absorbed and expanded keys, once that is decided."""
        return self._choice

    @override
    def op(self, phase: Phase) -> str:
        return "KMLATriton" if self.device.is_gpu else "KMLANative"

    def _split_infos(self, source: WeightSource) -> tuple[TensorInfo, TensorInfo] | None:
        k_b, v_b = (f"{self.key}.{name}.weight" for name in ("k_b_proj", "v_b_proj"))
        info = source.find(k_b)
        if info is None:
            return None
        return (
            expect_shape(info, k_b, (self.num_heads, self.rank, self.nope_dim)),
            expect_shape(source.find(v_b), v_b, (self.num_heads, self.v_dim, self.rank)),
        )

    def _merged_info(self, source: WeightSource) -> TensorInfo:
        name = f"{self.key}.kv_b_proj.weight"
        return expect_shape(source.find(name), name, (self.num_heads * (self.nope_dim + self.v_dim), self.rank))

    @override
    def requirements(self, source: WeightSource) -> Requirements:
        needs = super().requirements(source)
        split = self._split_infos(source)
        if self.device.is_gpu:
            for info in split or [self._merged_info(source)]:
                needs.add(self.device.name, info, math.prod(info.shape) * self.device.dtype.itemsize)
            return needs
        if split is not None:
            for info in split:
                needs.add("cpu", info)
            return needs
        info = self._merged_info(source)
        needs.add("cpu", info)
        if isinstance(info.resident_type, GroupType):
            needs.nbytes["cpu"] += 4 * math.prod(info.shape) - info.nbytes
        elif info.resident_type not in TWO_BYTE:  # k_b is transposed, which blocks of 32 cannot be: it becomes F32
            v_share = info.nbytes * self.v_dim // (self.nope_dim + self.v_dim)
            needs.nbytes["cpu"] += v_share + 4 * self.num_heads * self.nope_dim * self.rank - info.nbytes
        return needs

    @override
    def load(self, source: WeightSource) -> None:
        super().load(source)
        if self._split_infos(source) is not None:
            self.k_b = self.kept(source.tensor(f"{self.key}.k_b_proj.weight"))
            self.v_b = self.kept(source.tensor(f"{self.key}.v_b_proj.weight"))
        else:
            self._merged_info(source)
            merged = source.tensor(f"{self.key}.kv_b_proj.weight")
            self.k_b, self.v_b = split_up_projections(merged, self.spec, self.config.require_pool())
        if self.device.is_gpu:
            self._gpu = GpuLatent.of(self.k_b, self.v_b, self.device, self.config.require_pool())
            self.k_b = self.v_b = None

    @override
    def bind(self, runtime: OperatorRuntime) -> None:
        if self._has_indexer:
            self._require_indexer()
        self._flash = runtime.find(FlashLayer)
        self._choice = self.materialization_choice(self._flash)
        if not self.device.is_gpu:
            return
        inner: Any = self.inner
        weight = inner.kv_a_layernorm.weight
        self._norm_weight = weight if self.spec.latent_scale == 1.0 else weight * self.spec.latent_scale
        if getattr(inner, "q_a_proj", None) is None:
            self._compressions = JoinedLinears([inner.q_proj, inner.kv_a_proj_with_mqa])
            return
        self._compressions = JoinedLinears([inner.q_a_proj, inner.kv_a_proj_with_mqa])
        norm = inner.q_a_layernorm
        if isinstance(norm, KRMSNorm) and norm.spec is not None and norm.device.name == self.device.name:
            self._query_norm = norm.spec

    @override
    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any = None,
        attention_mask: torch.Tensor | None = None,
        forward_context: ForwardContext | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        if forward_context is None or masks_positions(attention_mask):
            raise UnsupportedError("latent attention runs inside the engine only: it needs forward_context and no mask")
        if self._gpu is not None:
            given = kwargs.get("prev_topk_indices")
            return self._forward_on_gpu(self._gpu, hidden_states, position_embeddings, forward_context, given)
        assert self.k_b is not None, f"{self.key} is not loaded"
        if self._is_native is None:
            self._is_native = self.is_native_on_cpu()
        run = untraced(self._forward_on_cpu) if self._is_native else self._forward_on_cpu
        return run(hidden_states, position_embeddings, forward_context, kwargs.get("prev_topk_indices"))

    @override
    def bypassed(self) -> Iterable[nn.Module]:
        return [child for name, child in self.inner.named_children() if name in self.OWNED_CHILDREN]

    def is_native_on_cpu(self) -> bool:
        """Whether all but products of real numbers runs in native kernels: no gate, no norm or projection of torch."""
        inner: Any = self.inner
        if self.is_sparse or self.spec.gate is not Gate.NONE:
            return False
        compressed = ["q_proj"] if getattr(inner, "q_a_proj", None) is None else ["q_a_proj", "q_b_proj"]
        linears = [getattr(inner, name) for name in (*compressed, "kv_a_proj_with_mqa", "o_proj")]
        names = ["kv_a_layernorm", *(["q_a_layernorm"] if len(compressed) == 2 else [])]
        norms = [
            getattr(inner, name) for name in (*names, *(["k_rope_only_layernorm"] if self.spec.has_rope_norm else []))
        ]
        has_kernels = all(isinstance(linear, KTransformersLinear) and linear.native is not None for linear in linears)
        has_norms = all(isinstance(norm, KRMSNorm) and norm.spec is not None for norm in norms)
        return has_kernels and has_norms and self.spec.temperature is None

    def _forward_on_cpu(
        self, hidden_states: torch.Tensor, position_embeddings: Any, forward_context: ForwardContext, given: Any
    ) -> tuple[Any, ...]:
        assert self.v_b is not None
        pool = self.config.require_pool()
        cos, sin, is_interleaved = self.angles(position_embeddings, forward_context)
        q, compressed, gate = self._projected_query(hidden_states)
        q = self._scaled(q, forward_context)
        query = self._absorbed_query(q, cos, sin, is_interleaved, pool)
        keys, values = forward_context.cache.layer(self.layer_idx)
        scales = forward_context.cache.scales(self.layer_idx)
        row = self._latent(hidden_states, cos, sin, is_interleaved)
        cpu.write_kv(row, forward_context.slot_mapping, keys, scales[0], pool, split=self.rank)
        topk_positions = self._selection(hidden_states, compressed, (cos, sin), forward_context, given)
        pages = forward_context.pages if topk_positions is None else topk_positions.pages
        spec = self.spec
        call = AttentionCall(
            query, keys, values, pages, spec.scale, window=spec.window, sinks=self._sinks, scales=scales
        )  # fmt: skip
        latent = cpu.attention(call, pool)
        out = self._output(hidden_states, cpu.batched_linear(latent, self.v_b, pool), gate)
        return self._result(out, topk_positions)

    @property
    def _sinks(self) -> torch.Tensor | None:
        """fp32 [H]."""
        inner: Any = self.inner
        return inner.sinks.float() if self.spec.has_sinks else None

    def _result(self, output: torch.Tensor, topk_positions: TopkPositions | None) -> tuple[Any, ...]:
        """As the module returns it: with what was chosen, where layers behind this one are to attend to the same."""
        return (output, None, topk_positions) if self.spec.hands_selection else (output, None)

    def _selection(
        self,
        x: torch.Tensor,
        compressed: torch.Tensor | None,
        angles: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
        given: TopkPositions | None,
    ) -> TopkPositions | None:
        """The positions that rows x [1, T, hidden] attend to, by the layer's indexer or as given; None: all.

        compressed: the compressed query [1, T, q_lora_rank].
        """
        if not self.is_sparse:
            return None
        if not self._has_indexer:
            return None if given is None else given.to(self.layer_device.torch_device)
        keys = context.cache.index_keys(self.layer_idx)
        assert compressed is not None
        return self._require_indexer().choose(x, compressed, angles, context.on(keys.device), keys)

    def _require_indexer(self) -> KIndexer:
        indexer = self.inner.get_submodule("indexer")
        if isinstance(indexer, KIndexer):
            return indexer
        kind = "KPooledIndexer" if hasattr(indexer, "index_kpool") else "KIndexer"
        raise UnsupportedError(
            f"{self.key}.indexer chooses what is attended to: add a rule with class {kind} for it, as the shipped "
            "files have, or attend to everything with --sparse_attention off"
        )

    def _output(self, x: torch.Tensor, values: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        """The heads' values [T, H, V] of rows x [1, T, hidden], gated where the family does, through o_proj.

        gate: [T, H, V], what is known of it already.
        """
        inner: Any = self.inner
        if self.spec.gate is Gate.HEADS:
            gate = inner.g_proj(x)[0][..., None]
        elif self.spec.gate is Gate.ELEMENTS:
            gate = inner.gate_proj(x)[0].view(values.shape)
        if gate is not None:
            with exact_math(self):
                values = values * torch.sigmoid(gate.float()).to(values.dtype)
        output: torch.Tensor = inner.o_proj(values.reshape(1, -1, self.num_heads * self.v_dim))
        return output

    def _forward_on_gpu(
        self,
        gpu: GpuLatent,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        forward_context: ForwardContext,
        given: TopkPositions | None,
    ) -> tuple[Any, ...]:
        inner: Any = self.inner
        rotation = Rotation(*self.angles(position_embeddings, forward_context))
        keys, _ = forward_context.cache.layer(self.layer_idx)
        assert self._compressions is not None, f"{self.key} is not bound"
        assert self._latent_norm is not None
        assert self._norm_weight is not None
        context = forward_context.on(keys.device)
        self.device.time_part("linear", self.layer)
        query, compressed = self._compressions(hidden_states[0])
        if self.spec.has_rope_norm:
            compressed = torch.cat((compressed[:, : self.rank], self._shared_key(compressed)), dim=-1)
        compressed = self._padded(compressed)
        choice = self._choice if forward_context.phase is Phase.PREFILL else None
        materialization = None if choice is None else StepRuns.materialization_of(forward_context, choice, keys.device)
        step = LatentStep(
            compressed,
            (self._norm_weight, self._latent_norm.eps),
            rotation,
            keys,
            context,
            self.spec.scale,
            attend=None if self._flash is None or materialization is not None else self._flash.of(forward_context),
            materialization=materialization,
            scales=context.cache.scales(self.layer_idx)[0],
            window=self.spec.window,
            sinks=self._sinks,
            workspace=None if materialization is None or choice is None else self.device.latent_workspace(choice.room),
        )
        normed = None
        if getattr(inner, "q_a_proj", None) is None:
            pass
        elif self._query_norm is not None and gpu.is_small(step):
            normed = gpu.cache_and_norm(step, query, (inner.q_a_layernorm.weight, self._query_norm.eps))
            step = replace(step, is_cached=True)
        else:
            normed = inner.q_a_layernorm(query)
        gate = None
        if normed is None:
            q = query
        elif self.spec.gate is Gate.JOINT:
            q, gate = self._query_and_gate(normed, query)
        else:
            q = inner.q_b_proj(normed)
        compressed_query = None if normed is None else normed[None]
        topk_positions = self._selection(
            hidden_states, compressed_query, (rotation.cos, rotation.sin), forward_context, given
        )
        step = replace(step, topk_positions=topk_positions)
        self.device.time_part("attention")
        q = self._padded(self._scaled(q.view(-1, self.num_heads, self.spec.head_dim), context))
        out = gpu.attend(q.to(self.device.dtype), step)
        self.device.time_part("linear")
        return self._result(self._output(hidden_states, out, gate), topk_positions)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """With columns of zeros where there should be rotary ones."""
        added = self.rope_dim - self.spec.rope_dim
        return torch.nn.functional.pad(x, (0, added)) if added else x

    def _scaled(self, q: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Queries [T, H, N + P], grown with their positions where the family does that."""
        if self.spec.temperature is None:
            return q
        positions = (context.kv_lens - 1).clamp_min(0).float()  # rows that see nothing have none
        with exact_math(self):
            return q * self.spec.temperature.of(positions)[:, None, None].to(q.dtype)

    def angles(self, position_embeddings: Any, context: ForwardContext) -> tuple[torch.Tensor, torch.Tensor, bool]:
        """Return (cos, sin) [T, P / 2] and the pairing. DeepSeek-V2 gives complex numbers, later families a pair.

        Where nothing is rotated all angles are 0.
        """
        if not self.spec.has_rotation:
            here = context.on(self.layer_device.torch_device)
            return *here.derived("angles of 0", here.kv_lens, self._angles_of_0), False
        is_interleaved = self.rotates_neighbours(position_embeddings)
        if isinstance(position_embeddings, torch.Tensor):
            return *context.derived("real parts", position_embeddings, real_parts), is_interleaved
        cos, sin = (part[0, :, : self.rope_dim // 2] for part in position_embeddings)
        return cos, sin, is_interleaved

    def rotates_neighbours(self, position_embeddings: Any) -> bool:
        """Whether the rotation pairs neighbouring columns, by the embeddings that the model gives."""
        if not self.spec.has_rotation or isinstance(position_embeddings, torch.Tensor):
            return self.spec.has_rotation
        latent = self.config.facts.latent
        return not self.spec.rotates_halves and (latent is None or latent.is_interleaved)

    def _angles_of_0(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones = torch.ones(len(rows), self.rope_dim // 2, device=rows.device)
        return ones, torch.zeros_like(ones)

    def _absorbed_query(
        self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool, pool: cpu.WorkerPool
    ) -> torch.Tensor:
        """Absorbed query fp32 [T, H, R + P] of q [T, H, N + P]."""
        assert self.k_b is not None
        absorbed = cpu.batched_linear(q[..., : self.nope_dim].contiguous(), self.k_b, pool)
        return torch.cat((absorbed, rotate(q[..., self.nope_dim :], cos, sin, is_interleaved)), dim=-1)

    def _projected_query(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Query before absorption and rotation, [T, H, N + P]; the compressed one that it was made of, and a gate
        [T, H, V] that was made with it, if any."""
        inner: Any = self.inner
        if self.spec.gate is Gate.JOINT:
            raw = inner.q_a_proj(x)
            compressed = inner.q_a_layernorm(raw)
            q, gate = self._query_and_gate(compressed, raw)
            return q, compressed, gate
        if getattr(inner, "q_a_proj", None) is None:
            compressed, q = None, inner.q_proj(x)
        else:
            compressed = inner.q_a_layernorm(inner.q_a_proj(x))
            q = inner.q_b_proj(compressed)
        return q.view(-1, self.num_heads, self.spec.head_dim), compressed, None

    def _query_and_gate(self, compressed: torch.Tensor, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, H, N + P] and [T, H, V], both made of the compressed query [..., T, Q] with its norm and without."""
        inner: Any = self.inner
        joined = inner.q_gate_proj(torch.cat((compressed, raw), dim=-1))
        q, gate = joined.view(-1, self.num_heads, self.spec.head_dim + self.v_dim).split(
            (self.spec.head_dim, self.v_dim), dim=-1
        )
        return q, gate

    def _latent(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
        """What the cache stores: fp32 [T, 1, R + P]."""
        inner: Any = self.inner
        compressed = inner.kv_a_proj_with_mqa(x)[0]
        latent = inner.kv_a_layernorm(compressed[:, : self.rank])
        if self.spec.latent_scale != 1.0:
            latent = latent * self.spec.latent_scale
        k_rot = rotate(self._shared_key(compressed)[:, None], cos, sin, is_interleaved)
        return torch.cat((latent[:, None], k_rot), dim=-1)

    def _shared_key(self, compressed: torch.Tensor) -> torch.Tensor:
        """[T, P] of [T, R + P]: what of the keys is rotated, before that."""
        inner: Any = self.inner
        key = compressed[:, self.rank :]
        return inner.k_rope_only_layernorm(key) if self.spec.has_rope_norm else key
