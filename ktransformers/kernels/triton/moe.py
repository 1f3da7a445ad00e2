"""Mixture of experts on quantized weights, on CUDA: what the rule name KExpertsMarlin means.

    hidden = silu(x W_gate^T) * (x W_up^T);  out[t] = sum over j of topk_weights[t, j] * (hidden W_down^T)

or with biases behind the three products and another activation (`Between`).
Two paths. Few tokens with weights in the GPU's layout: one program per pair and tile of rows, on the vector loop (an
expert that two tokens share is read from the L2 cache the second time); two launches, and one before them that makes
digits of x (digits.py) where gate and up are of types that take them. Otherwise: pairs sorted by expert
(align.py), then tensor-core tiles over blocks of one expert. Both add a token's experts in the order of its top-k list.
Experts lie in slots of one tensor per projection; a staging buffer may hold a few of them (`moe_blocks`), in the layout
of the CPU kernels too. Launches depend on shapes alone; with `out` and a workspace nothing is allocated.
Knows no router and no model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ktransformers.kernels.triton.align import SMALL_PAIRS, AlignedPairs, known_expert, max_blocks, moe_align
from ktransformers.kernels.triton.bits import ONE
from ktransformers.kernels.triton.dequant import check_matrix, runs_ahead
from ktransformers.kernels.triton.digits import digit_shape, make_digits, store_digits
from ktransformers.kernels.triton.elementwise import activation_value
from ktransformers.kernels.triton.linear import check_rows, result, warps_for
from ktransformers.kernels.triton.matmul import arrive_last, dot_tile, dot_tile_pair, vector_pair, vector_tile
from ktransformers.kernels.triton.matmul_digits import has_digits, is_strided
from ktransformers.kernels.triton.relay import GpuLayout, has_vector_loop, layout_nbytes
from ktransformers.kernels.triton.runtime import jit, tl, triton
from ktransformers.kernels.triton.tables import tables
from ktransformers.kernels.triton.tiles_grid import has_grid
from ktransformers.kernels.types import Activation, ActivationSpec, ExpertWeights, WeightType

__all__ = [
    "SILU",
    "VECTOR_TOKENS",
    "Between",
    "ExpertMatrices",
    "MoeWorkspace",
    "block_rows",
    "moe",
    "moe_blocks",
    "moe_sum",
]

#: Largest number of tokens for which every pair is computed on its own.
VECTOR_TOKENS = 16
_MEANS = (12, 24, 96)  # pairs of an expert, up to which blocks have 16, 32 and 64 rows
_DOWN_ROWS = 64  # of one program of the down projection


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """One projection of all experts: matrices [rows, cols] one after another.

    data: uint8 [S, bytes of a matrix] (or [S, rows, row_bytes]), contiguous; S slots. layout: of each matrix.
    Raises TypeError or ValueError when sizes do not agree.
    """

    data: Tensor
    qtype: WeightType
    rows: int
    cols: int
    layout: GpuLayout = GpuLayout.ROWS

    def __post_init__(self) -> None:
        check_matrix(self.data, self.qtype, self.rows, self.cols, self.layout, self.slots)

    @property
    def slots(self) -> int:
        return self.data.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of one matrix."""
        return layout_nbytes(self.qtype, self.rows, self.cols, self.layout)


@dataclass(frozen=True, slots=True)
class Between:
    """What experts compute beside products.

    activation: of gate and up. biases: None, or those of gate and up, [E, I], and of down, [E, H], fp32, contiguous, on
    the device; by the experts' ids, wherever their matrices are.
    """

    activation: ActivationSpec = field(default_factory=ActivationSpec)
    biases: tuple[Tensor, Tensor, Tensor] | None = None

    @classmethod
    def of(cls, weights: ExpertWeights, activation: ActivationSpec, device: torch.device) -> Between:
        """Of experts with a gate; a bias that is missing beside others is zero."""
        given = (weights.gate_bias, weights.up_bias, weights.down_bias)
        if all(bias is None for bias in given):
            return cls(activation)
        made = list[Tensor]()
        for bias, part in zip(given, (weights.gate, weights.up, weights.down), strict=True):
            assert part is not None
            zeros = torch.zeros(len(part), part[0].shape[0]) if bias is None else bias
            made.append(zeros.to(device, torch.float32).contiguous())
        return cls(activation, (made[0], made[1], made[2]))

    def check(self, num_experts: int, inner: int, width: int) -> None:
        """Raises TypeError or ValueError for biases of other experts than these."""
        for bias, size in zip(self.biases or (), (inner, inner, width), strict=False):
            if bias.dtype != torch.float32:
                raise TypeError(f"biases must be float32, got {bias.dtype}")
            if bias.shape != (num_experts, size) or not bias.is_contiguous():
                raise ValueError(f"a bias must be contiguous [{num_experts}, {size}], got {tuple(bias.shape)}")

    def options(self) -> dict[str, object]:
        """Constants of the kernels; numbers that an activation does not use make no kernels of their own."""
        kind = self.activation.kind
        return {
            "ACT": kind.name,
            "ALPHA": float(self.activation.alpha) if kind is Activation.SWIGLU_OAI else 0.0,
            "LIMIT": float(self.activation.limit) if kind.is_clamped else 0.0,
            "HAS_BIAS": self.biases is not None,
        }


SILU = Between()


@dataclass(frozen=True, slots=True)
class MoeWorkspace:
    """Memory between the kernels of one call; calls that share it must run one after another on one stream.

    hidden: [P, I] in x's dtype. parts: [P, H], fp32 on the vector path, x's dtype on the other.
    counters: int32, 0 between calls. aligned: of the other path only. digits: of the vector path, those of x and of
    what is hidden, int32 of `digit_shape`, whether or not this call's types take them.
    """

    hidden: Tensor
    parts: Tensor
    counters: Tensor
    aligned: AlignedPairs | None
    digits: tuple[Tensor, Tensor] | None = None

    @classmethod
    def allocate(
        cls,
        x: Tensor,
        top_k: int,
        num_experts: int,
        up: ExpertMatrices,
        down: ExpertMatrices,
    ) -> MoeWorkspace:
        """For calls with x's number of rows and dtype, on x's device."""
        tokens = x.shape[0]
        pairs = tokens * top_k
        vector = uses_vector_path(tokens, up, down)
        counters = tokens * triton.cdiv(down.rows, _DOWN_ROWS) if vector else 1
        shapes = (digit_shape(tokens, up.cols), digit_shape(pairs, up.rows))
        made = [torch.empty(shape, dtype=torch.int32, device=x.device) for shape in shapes if vector]
        return cls(
            torch.empty(pairs, up.rows, dtype=x.dtype, device=x.device),
            torch.empty(pairs, down.rows, dtype=torch.float32 if vector else x.dtype, device=x.device),
            torch.zeros(counters, dtype=torch.int32, device=x.device),
            None if vector else AlignedPairs.allocate(pairs, num_experts, block_rows(pairs, num_experts), x.device),
            (made[0], made[1]) if vector else None,
        )

    def check(self, pairs: int, inner: int, width: int) -> None:
        """Raises ValueError when the workspace is not for calls of this size."""
        if self.hidden.shape != (pairs, inner) or self.parts.shape != (pairs, width):
            raise ValueError(
                f"workspace is for {self.hidden.shape[0]} pairs of widths {self.hidden.shape[1]} and "
                f"{self.parts.shape[1]}, the call has {pairs} of {inner} and {width}"
            )


def uses_vector_path(tokens: int, up: ExpertMatrices, down: ExpertMatrices) -> bool:
    """Whether so many tokens take the path of few; gate is as up (`_check`)."""
    return tokens <= VECTOR_TOKENS and all(has_vector_loop(int(part.qtype), part.layout) for part in (up, down))


def row_thresholds(num_experts: int, top_k: int) -> list[int]:
    """Numbers of rows after which `moe` and `moe_blocks` launch other kernels."""
    blocks = (int(mean * num_experts) // top_k for mean in _MEANS)
    return sorted({VECTOR_TOKENS, SMALL_PAIRS // top_k, *blocks})


def block_rows(pairs: int, num_experts: int) -> int:
    """Rows of a block: about the pairs that an expert gets, so that few rows of a block stay empty."""
    mean = pairs / num_experts
    return next((16 * 2**i for i, most in enumerate(_MEANS) if mean <= most), 128)


def _tile_shape(part: ExpertMatrices, block: int, count: int) -> tuple[int, int]:
    """Rows of each of `count` matrices that a program multiplies with blocks of so many rows of x, and its warps."""
    if runs_ahead(int(part.qtype), int(part.layout)):
        return 128 // count, 4
    if block == 16:
        return 64 // count, 2
    return (128, 8) if block == 128 and count == 1 else (64, 4)


@jit
def activated(gate, up, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    if ACT == "SILU":
        return gate / (1.0 + tl.exp(-gate)) * up
    return activation_value(gate, up, ALPHA, LIMIT, ACT, True)


@jit
def _gate_up_vector(x, stride, ids, gate, up, gate_bias, up_bias, hidden, one, tables, GATE: tl.constexpr,
                    UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr, K: tl.constexpr,
                    N: tl.constexpr, E: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr,
                    KS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
                    HAS_BIAS: tl.constexpr, STRIDED: tl.constexpr):  # fmt: skip
    """x and hidden: rows of 16-bit floats, or of digits; STRIDED: their order in `hidden`."""
    tile, p = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + p)
    slot = known_expert(expert, E)
    if slot >= 0:
        n = tile * BN + tl.arange(0, BN)
        at = slot.to(tl.int64)
        row = x + (p // TOP_K).to(tl.int64) * stride
        g, u = vector_pair(row, gate + at * GATE_BYTES, up + at * UP_BYTES, n[None, :], n[None, :] < N, one, tables, 0,
                               (K // 32 + KS - 1) // KS, GATE, UP, K, N, KS)  # fmt: skip
        if HAS_BIAS:
            g += tl.load(gate_bias + expert * N + n, mask=n < N, other=0.0)
            u += tl.load(up_bias + expert * N + n, mask=n < N, other=0.0)
        value = activated(g, u, ACT, ALPHA, LIMIT)
        if hidden.dtype.element_ty == tl.int32:
            block = tile * (BN // 32) + tl.arange(0, BN // 32)
            store_digits(hidden + p * N, block, tl.reshape(value, (BN // 32, 32)), block < N // 32, STRIDED)
        else:
            tl.store(hidden + p * N + n, value.to(hidden.dtype.element_ty), mask=n < N)


@jit
def _down_vector(hidden, ids, weights, down, bias, parts, counters, out, one, tables, TYPE: tl.constexpr,
                 BYTES: tl.constexpr, K: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
                 TOP_K: tl.constexpr, BN: tl.constexpr, KS: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """The last program of a token and a tile to finish adds the parts of all its experts, in their order."""
    tile, p = tl.program_id(0), tl.program_id(1)
    expert = tl.load(ids + p)
    slot = known_expert(expert, E)
    n = tile * BN + tl.arange(0, BN)
    mask = n < N
    steps = tl.where(slot >= 0, (K // 32 + KS - 1) // KS, 0)  # no expert: the part is zero
    value, _, _, _ = vector_tile(hidden + p * K, 0, down + slot.to(tl.int64) * BYTES, n[None, :], mask[None, :], one,
                                 tables, 0,
                                 steps, TYPE, K, N, KS, 1)  # fmt: skip
    if HAS_BIAS:
        value += tl.load(bias + expert * N + n, mask=n < tl.where(slot >= 0, N, 0), other=0.0)
    tl.store(parts + p * N + n, value * tl.load(weights + p), mask=mask)
    token = p // TOP_K
    if arrive_last(counters + token * tl.num_programs(0) + tile, TOP_K):
        at = parts + token * TOP_K * N + n
        total = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        for j in range(1, TOP_K):
            total += tl.load(at + j * N, mask=mask, other=0.0, cache_modifier=".cg")
        tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["P", "first"])
def _gate_up_tile(x, stride, ids, pair_ids, block_slots, gate, up, gate_bias, up_bias, hidden, P, first, one, tables,
                  GATE: tl.constexpr, UP: tl.constexpr, GATE_BYTES: tl.constexpr, UP_BYTES: tl.constexpr,
                  LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, ACT: tl.constexpr, ALPHA: tl.constexpr,
                  LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    block = first + tl.program_id(0)
    slot = tl.load(block_slots + block).to(tl.int64)
    if slot >= 0:
        n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
        pair = tl.load(pair_ids + block * BM + tl.arange(0, BM))[:, None]
        rows = x + (pair // TOP_K).to(tl.int64) * stride
        g, u = dot_tile_pair(rows, pair < P, gate + slot * GATE_BYTES, up + slot * UP_BYTES, tl.program_id(1) * BN, one,
                             tables, 0, (K + BK - 1) // BK, GATE, UP, LAYOUT, K, N, BN, BK, WARPS)  # fmt: skip
        if HAS_BIAS:
            expert = tl.load(ids + tl.load(pair_ids + block * BM))  # of all pairs in the block
            g += tl.load(gate_bias + expert * N + n, mask=n < N, other=0.0)
            u += tl.load(up_bias + expert * N + n, mask=n < N, other=0.0)
        value = activated(g, u, ACT, ALPHA, LIMIT).to(hidden.dtype.element_ty)
        tl.store(hidden + pair.to(tl.int64) * N + n, value, mask=(pair < P) & (n < N))


@jit(do_not_specialize=["P", "first"])
def _down_tile(hidden, ids, pair_ids, block_slots, weights, down, bias, parts, P, first, one, tables,
               TYPE: tl.constexpr,
               BYTES: tl.constexpr, LAYOUT: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr,
               BN: tl.constexpr, BK: tl.constexpr, WARPS: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    block = first + tl.program_id(0)
    slot = tl.load(block_slots + block).to(tl.int64)
    if slot >= 0:
        n = tl.program_id(1) * BN + tl.arange(0, BN)[None, :]
        pair = tl.load(pair_ids + block * BM + tl.arange(0, BM))[:, None]
        acc = dot_tile(hidden + pair.to(tl.int64) * K, pair < P, down + slot * BYTES, n, n < N, one, tables, 0,
                       (K + BK - 1) // BK, TYPE, LAYOUT, K, N, BK, WARPS)  # fmt: skip
        if HAS_BIAS:
            expert = tl.load(ids + tl.load(pair_ids + block * BM))
            acc += tl.load(bias + expert * N + n, mask=n < N, other=0.0)
        value = acc * tl.load(weights + pair, mask=pair < P, other=0.0)
        tl.store(parts + pair.to(tl.int64) * N + n, value.to(parts.dtype.element_ty), mask=(pair < P) & (n < N))


@jit
def _sum_kernel(parts, ids, out, N: tl.constexpr, E: tl.constexpr,
                TOP_K: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """out[t] = sum of the parts of token t, in their order, without those that no expert wrote."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    for j in range(TOP_K):
        p = token * TOP_K + j
        slot = known_expert(tl.load(ids + p), E)
        total += tl.load(parts + p * N + n, mask=n < tl.where(slot >= 0, N, 0), other=0.0).to(tl.float32)
    tl.store(out + token * N + n, total.to(out.dtype.element_ty), mask=n < N)


def _vector(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int,
    matrices: tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices], out: Tensor, space: MoeWorkspace,
    between: Between,
) -> None:  # fmt: skip
    gate, up, down = matrices
    gate_bias, up_bias, down_bias = between.biases or (x, x, x)
    pairs, top_k = ids.numel(), ids.shape[1]
    common = {"E": num_experts, "TOP_K": top_k}
    rows, hidden = _inputs(x, gate, up, space), space.hidden
    if takes_digits(down):
        assert space.digits is not None, "the workspace is for many tokens"
        hidden = space.digits[1]
    block = 64 if triton.cdiv(up.rows, 64) * pairs >= 256 else 32
    # Loops over tiles keep what they read ahead in registers: of 8 warps few programs would fit.
    is_few = block == 32 and rows is not x
    warps, groups = warps_for(up.cols // 32, block, 4 if up.layout == GpuLayout.TILES and not is_few else 8)
    _gate_up_vector[(triton.cdiv(up.rows, block), pairs)](
        rows, rows.stride(0), ids, gate.data, up.data, gate_bias, up_bias, hidden, ONE, tables(x.device),
        int(gate.qtype), int(up.qtype), gate.nbytes, up.nbytes, up.cols, up.rows, BN=block, KS=groups,
        STRIDED=is_strided(int(down.qtype)), num_warps=warps, **common, **between.options(),
    )  # fmt: skip
    warps, groups = warps_for(down.cols // 32, _DOWN_ROWS)
    _down_vector[(triton.cdiv(down.rows, _DOWN_ROWS), pairs)](
        hidden, ids, weights, down.data, down_bias, space.parts, space.counters, out, ONE, tables(x.device),
        int(down.qtype),
        down.nbytes, down.cols, down.rows, BN=_DOWN_ROWS, KS=groups, HAS_BIAS=between.biases is not None,
        num_warps=warps, **common,
    )  # fmt: skip


def takes_digits(*parts: ExpertMatrices) -> bool:
    """Whether the vector loop multiplies these with digits, of one order and in one loop."""
    types = [int(part.qtype) for part in parts]
    kinds = {(is_strided(number), bool(has_grid(number))) for number in types}
    return all(has_digits(number) for number in types) and len(kinds) == 1


def _inputs(x: Tensor, gate: ExpertMatrices, up: ExpertMatrices, space: MoeWorkspace) -> Tensor:
    """What gate and up are multiplied with on the vector path: x, or its digits."""
    if not takes_digits(gate, up):
        return x
    assert space.digits is not None, "the workspace is for many tokens"
    return make_digits(x, space.digits[0], is_strided(int(up.qtype)))


def _tiles(
    x: Tensor, ids: Tensor, weights: Tensor, num_experts: int,
    matrices: tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices], space: MoeWorkspace, between: Between,
) -> None:  # fmt: skip
    pairs = ids.numel()
    block = block_rows(pairs, num_experts)
    aligned = moe_align(ids, num_experts, block, out=space.aligned)
    _blocks(x, ids, weights, aligned, (0, max_blocks(pairs, num_experts, block)), block, matrices, space, between)


def _blocks(
    x: Tensor, ids: Tensor, weights: Tensor, aligned: AlignedPairs, span: tuple[int, int], block: int,
    matrices: tuple[ExpertMatrices, ExpertMatrices, ExpertMatrices], space: MoeWorkspace, between: Between,
) -> None:  # fmt: skip
    """The blocks span[0] .. span[1] - 1, of `block` rows each."""
    gate, up, down = matrices
    gate_bias, up_bias, down_bias = between.biases or (x, x, x)
    pairs, top_k = weights.numel(), weights.shape[1]
    first, blocks = span[0], span[1] - span[0]
    block_n, warps = _tile_shape(up, block, 2)
    _gate_up_tile[(blocks, triton.cdiv(up.rows, block_n))](
        x, x.stride(0), ids, aligned.pair_ids, aligned.block_slots, gate.data, up.data, gate_bias, up_bias,
        space.hidden, pairs, first, ONE, tables(x.device), int(gate.qtype), int(up.qtype), gate.nbytes, up.nbytes,
        int(up.layout), up.cols, up.rows, TOP_K=top_k, BM=block, BN=block_n, BK=64, WARPS=warps, num_warps=warps,
        **between.options(),
    )  # fmt: skip
    block_n, warps = _tile_shape(down, block, 1)
    _down_tile[(blocks, triton.cdiv(down.rows, block_n))](
        space.hidden, ids, aligned.pair_ids, aligned.block_slots, weights, down.data, down_bias, space.parts, pairs,
        first, ONE, tables(x.device), int(down.qtype), down.nbytes, int(down.layout), down.cols, down.rows,
        BM=block, BN=block_n, BK=64, WARPS=warps, HAS_BIAS=between.biases is not None, num_warps=warps,
    )  # fmt: skip


def _check(
    x: Tensor, ids: Tensor, weights: Tensor, gate: ExpertMatrices, up: ExpertMatrices, down: ExpertMatrices,
) -> None:  # fmt: skip
    check_rows("x", x, up.cols)
    if ids.dtype != torch.int32 or weights.dtype != torch.float32:
        raise TypeError(f"topk_ids must be int32 and topk_weights float32, got {ids.dtype} and {weights.dtype}")
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or weights.shape != ids.shape:
        raise ValueError(
            f"topk_ids and topk_weights must be [{x.shape[0]}, k], got {tuple(ids.shape)}, {tuple(weights.shape)}"
        )
    if not ids.is_contiguous() or not weights.is_contiguous():
        raise ValueError("topk_ids and topk_weights must be contiguous")
    same = (gate.rows, gate.cols, gate.layout, gate.slots) == (up.rows, up.cols, up.layout, up.slots)
    loops = {has_vector_loop(int(part.qtype), part.layout) for part in (gate, up)}
    if not same or len(loops) > 1 or (down.cols, down.slots) != (up.rows, up.slots):
        raise ValueError("gate and up must have one shape, layout, kind of loop and number of slots, and down must fit")


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate: ExpertMatrices,
    up: ExpertMatrices,
    down: ExpertMatrices,
    out: Tensor | None = None,
    *,
    workspace: MoeWorkspace | None = None,
    between: Between = SILU,
) -> Tensor:
    """The sum of each token's experts, [T, H], times their weights.

    x: [T, H] fp16 or bf16. topk_ids: int32 [T, k]; an id outside the experts counts for nothing. topk_weights: fp32
    [T, k]. gate, up: [I, H], of one layout; down: [H, I]; the types may differ. out: fp16, bf16 or fp32, x's
    dtype when None. workspace: of `MoeWorkspace.allocate` for this many rows. between: activation and biases. Between
    the projections, and on the path of many tokens before the sum, values are rounded to x's dtype, or to digits where
    down takes them. Raises TypeError or ValueError for arguments that do not fit.
    """
    _check(x, topk_ids, topk_weights, gate, up, down)
    num_experts = up.slots
    target = result(out, x, down.rows)
    if x.shape[0] == 0 or topk_ids.shape[1] == 0:
        return target.zero_()
    space = workspace or MoeWorkspace.allocate(x, topk_ids.shape[1], num_experts, up, down)
    space.check(topk_ids.numel(), up.rows, down.rows)
    between.check(num_experts, up.rows, down.rows)
    matrices = (gate, up, down)
    if uses_vector_path(x.shape[0], up, down):
        _vector(x, topk_ids, topk_weights, num_experts, matrices, target, space, between)
    else:
        _tiles(x, topk_ids, topk_weights, num_experts, matrices, space, between)
        moe_sum(topk_ids, target, space, num_experts)
    return target


def moe_blocks(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate: ExpertMatrices,
    up: ExpertMatrices,
    down: ExpertMatrices,
    workspace: MoeWorkspace,
    span: tuple[int, int],
    num_experts: int,
    between: Between = SILU,
) -> None:
    """Compute some of the blocks, for experts that come in turns through staging buffers.

    When every block has had its turn, `moe_sum` gives what one `moe` with all experts would have given on its path of
    many tokens, bit for bit. gate, up, down: of the experts that are there now, by slot.
    workspace.aligned: of `moe_align` with blocks of block_rows(pairs, num_experts), of topk_ids or of others that stand
    for them; topk_ids says whose the biases are. span: first block of this turn, and the one after its last. Other
    arguments as in `moe`.
    """
    assert workspace.aligned is not None, "the workspace has no sorted pairs"
    workspace.check(topk_weights.numel(), up.rows, down.rows)
    block = block_rows(topk_weights.numel(), num_experts)
    if span[1] > span[0]:
        _blocks(x, topk_ids, topk_weights, workspace.aligned, span, block, (gate, up, down), workspace, between)


def moe_sum(topk_ids: Tensor, out: Tensor, workspace: MoeWorkspace, num_experts: int) -> Tensor:
    """out [T, H] = the sum of each token's parts, in the order of its top-k list.

    Left out: ids outside 0 .. num_experts - 1.
    """
    tokens, top_k = topk_ids.shape
    if out.shape != (tokens, workspace.parts.shape[1]) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous [{tokens}, {workspace.parts.shape[1]}], got {tuple(out.shape)}")
    if tokens:
        _sum_kernel[(tokens, triton.cdiv(out.shape[1], 1024))](
            workspace.parts, topk_ids, out, N=out.shape[1], E=num_experts,
            TOP_K=top_k, BN=1024, num_warps=4,
        )  # fmt: skip
    return out
