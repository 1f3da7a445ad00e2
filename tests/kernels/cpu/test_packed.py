"""Repacked weights: every product is bit-equal to that of the same weights in block layout, in every tier."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import Isa, MoeKernel, WorkerPool
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import (
    ActivationSpec,
    ExpertWeights,
    QuantType,
    RawTensor,
    block_size,
    row_bytes,
)
from ktransformers.weights.quantize.write import QUANTIZABLE_TYPES, quantize
from tests.support.checks.decoding import parts_of_rows, set_row_scales

TYPES = sorted(cpu.PACKED_TYPES)
# The tile kernels run on every machine, over emulated registers.
NEEDS_AVX2 = (Isa.AVX_VNNI_EMULATED,) if Isa.AVX2 in cpu.available_isas() else ()
TIERS = (*cpu.available_isas(), *NEEDS_AVX2, Isa.AMX_EMULATED)


def random_weight(qtype: QuantType, rows: int, cols: int, seed: int = 0) -> RawTensor:
    if qtype not in QUANTIZABLE_TYPES:
        raw = wild_weight(qtype, rows, cols, seed)
        heads, blocks = parts_of(raw)
        set_row_scales(heads, np.random.default_rng(seed).uniform(-(2**-7), 2**-7, rows))
        if qtype is QuantType.MXFP4:
            blocks[:, 0] = 115 + blocks[:, 0] % 8  # scales from 2^-13 on
        if qtype is QuantType.IQ1_M:
            blocks[:, 55] &= 0x8F
        for at in FORMATS[qtype].halves:
            blocks[:, at + 1] &= 0x87  # scales below 2^-7
        return raw
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).numpy()
    return RawTensor(torch.from_numpy(quantize(values, qtype)).reshape(-1), qtype, (rows, cols))


def wild_weight(qtype: QuantType, rows: int, cols: int, seed: int = 7) -> RawTensor:
    """Random bytes, so that every bit of every field counts, under scales that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * row_bytes(qtype, cols),), dtype=torch.uint8, generator=generator)
    raw = RawTensor(data, qtype, (rows, cols))
    heads, blocks = parts_of(raw)
    heads[:, -1:] &= 0x3B
    if qtype is QuantType.MXFP4:
        blocks[:, 0] %= 250  # exponents of scales up to 2^121
    if qtype is QuantType.IQ1_M:
        blocks[:, 55] &= 0xBF  # the top of a scale that lies in four places
    for at in FORMATS[qtype].halves:
        blocks[:, at + 1] &= 0x3B  # exponents below those of infinities
    return raw


def parts_of(raw: RawTensor) -> tuple[np.ndarray, np.ndarray]:
    """What is in front of a matrix's rows, [rows, bytes], and its blocks, [blocks, bytes]: views where a type has
    something to set there.
    """
    heads, blocks = parts_of_rows(raw.data.view(raw.rows, -1).numpy(), QuantType(raw.qtype))
    return heads, blocks.reshape(-1, blocks.shape[-1])


@pytest.mark.every(5)
@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("qtype", TYPES)
@pytest.mark.parametrize(("rows", "cols"), [(16, 256), (48, 768), (5, 512), (33, 2048)])
def test_linear_is_bit_equal(isa: cpu.Isa, qtype: QuantType, rows: int, cols: int) -> None:
    pool = WorkerPool(2, isa)
    for weight in (random_weight(qtype, rows, cols), wild_weight(qtype, rows, cols)):
        packed = cpu.pack(weight, pool)
        assert packed.nbytes == cpu.packed_nbytes(qtype, rows, cols)
        for tokens in (1, 2, 3, 4, 5, 8, 10, 17, 33, 130):
            x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))
            assert torch.equal(cpu.linear(x, packed, pool), cpu.linear(x, weight, pool)), tokens
    pool.close()


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("qtype", [t for t in TYPES if 128 % block_size(t) == 0], ids=lambda qtype: qtype.name)
@pytest.mark.parametrize(("rows", "cols"), [(16, 128), (80, 384), (128, 896)])
def test_blocks_that_leave_a_piece_of_columns_unfilled(isa: cpu.Isa, qtype: QuantType, rows: int, cols: int) -> None:
    pool = WorkerPool(1, isa)
    weight = wild_weight(qtype, rows, cols)
    packed = cpu.pack(weight, pool)
    for tokens in (12, 48, 70):
        x = torch.randn(tokens, cols, generator=torch.Generator().manual_seed(tokens))
        assert torch.equal(cpu.linear(x, packed, pool), cpu.linear(x, weight, pool)), tokens
    pool.close()


@pytest.mark.parametrize("qtype", TYPES)
def test_packing_costs_at_most_three_percent(qtype: QuantType) -> None:
    five = (QuantType.Q3_K, QuantType.IQ3_K, QuantType.IQ2_K, QuantType.IQ2_KS, QuantType.IQ1_M)
    # In a file scales of IQ4_KSS are bits of its codes, codes of IQ4_KT share one, those of IQ2_KL are of two weights.
    more = {QuantType.IQ4_KSS: 1.07, QuantType.IQ4_KT: 1.07, QuantType.IQ2_KL: 1.22, **dict.fromkeys(five, 1.05)}
    most = more.get(qtype, 1.03)
    for rows, cols in ((768, 2048), (2048, 768), (1408, 2048), (2048, 1536), (151936, 2048)):
        assert cpu.packed_nbytes(qtype, rows, cols) <= most * rows * row_bytes(qtype, cols)


@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("qtype", TYPES)
def test_largest_products_do_not_saturate(isa: cpu.Isa, qtype: QuantType) -> None:
    """Rows of all ones or all zeros in every field but the scale of the block, times activations of -127 and 127."""
    pool, scalar, cols = WorkerPool(1, isa), WorkerPool(1, Isa.SCALAR), 512
    extremes = RawTensor(wild_weight(qtype, 32, cols).data.clone(), qtype, (32, cols))
    extremes.data.view(32, -1)[::2], extremes.data.view(32, -1)[1::2] = 0xFF, 0
    heads, blocks = parts_of_rows(extremes.data.view(32, -1).numpy(), qtype)
    set_row_scales(heads, np.full(32, 0.02))
    ones = torch.from_numpy(blocks)
    if qtype in (QuantType.MXFP4, QuantType.NVFP4):
        ones[..., : 1 if qtype is QuantType.MXFP4 else 4] = 120
    for at in FORMATS[qtype].halves:
        ones[..., at : at + 2] = torch.tensor([0x55, 0x25], dtype=torch.uint8)  # about 0.02
    if qtype is QuantType.IQ1_M:  # its scale lies in the upper halves of four bytes
        ones[..., 53] = ones[..., 53] & 15 | 0x40
        ones[..., 49] &= 15
        ones[..., 51] &= 15
        ones[..., 55] &= 15
    steps = torch.arange(cols)
    signs = [1 - 2 * (steps // period % 2) for period in (1, 2, 3, 4, 16, 32, 1024)]
    x = torch.stack([sign.float() for sign in (*signs, *(-one for one in signs))])
    packed = cpu.pack(extremes, pool)
    want = cpu.linear(x, extremes, scalar)
    assert want.isfinite().all()
    assert (want != 0).any()
    for tokens in (1, 4, len(x)):
        assert torch.equal(cpu.linear(x[:tokens], packed, pool), want[:tokens]), tokens
        assert torch.equal(cpu.linear(x[:tokens], extremes, pool), want[:tokens]), tokens
    pool.close()
    scalar.close()


MIXES = [
    (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K),
    (QuantType.Q8_0, QuantType.Q4_0, QuantType.MXFP4),
    (QuantType.IQ2_XXS, QuantType.IQ2_XS, QuantType.IQ3_XXS),
    (QuantType.IQ1_S, QuantType.IQ1_M, QuantType.IQ2_S),
    (QuantType.IQ3_S, QuantType.Q4_K, QuantType.IQ3_S),
    (QuantType.Q4_K, QuantType.Q8_0, QuantType.IQ4_XS),  # gate and up want different forms of activations
    (QuantType.Q2_K, QuantType.Q2_K, QuantType.Q3_K),
    (QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1),
    (QuantType.TQ1_0, QuantType.TQ2_0, QuantType.IQ4_NL),
    (QuantType.NVFP4, QuantType.Q3_K, QuantType.NVFP4),
    (QuantType.Q1_0, QuantType.MXFP4, QuantType.Q1_0),
]
"""Types of gate, up and down."""
REST = [qtype for qtype in TYPES if not any(qtype in kinds for kinds in MIXES)]


@pytest.mark.every(5)
@pytest.mark.parametrize("isa", TIERS)
@pytest.mark.parametrize("kinds", [*MIXES, *((qtype, QuantType.IQ4_XS, qtype) for qtype in REST)])
def test_experts_are_bit_equal(isa: cpu.Isa, kinds: tuple[QuantType, ...]) -> None:
    pool = WorkerPool(3, isa)
    experts, hidden, width, top_k = 6, 512, 256, 3
    parts = [
        [random_weight(kind, *shape, seed=10 * i + e) for e in range(experts)]
        for i, (kind, shape) in enumerate(zip(kinds, ((width, hidden), (width, hidden), (hidden, width)), strict=True))
    ]
    plain = MoeKernel(ExpertWeights(*parts), ActivationSpec(), pool)
    repack_on_device = MoeKernel(
        ExpertWeights(*([cpu.pack(w, pool) for w in part] for part in parts)), ActivationSpec(), pool
    )
    for tokens in (1, 2, 7, 40):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, hidden, generator=generator)
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
        weights = torch.rand(tokens, top_k, generator=generator)
        assert torch.equal(plain.forward(x, ids, weights), repack_on_device.forward(x, ids, weights))
    pool.close()


@pytest.mark.every(3)
@pytest.mark.parametrize("isa", TIERS)
def test_results_that_go_past_the_caches_are_those_that_do_not(isa: cpu.Isa) -> None:
    """From 16 MiB of rows of experts on. The last tokens share their experts with others than in the smaller call."""
    pool = WorkerPool(2, isa)
    experts, hidden, width, top_k, tokens = 32, 4096, 32, 8, 128
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    parts = [
        [cpu.pack(random_weight(QuantType.Q8_0, *shape, seed=10 * i + e), pool) for e in range(experts)]
        for i, shape in enumerate(shapes)
    ]
    kernel = MoeKernel(ExpertWeights(*parts), ActivationSpec(), pool)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
    weights = torch.rand(tokens, top_k, generator=generator)
    assert tokens * top_k * hidden * 4 == 16 << 20
    assert torch.equal(kernel.forward(x, ids, weights)[64:], kernel.forward(x[64:], ids[64:], weights[64:]))
    pool.close()


def test_what_cannot_be_packed_is_refused() -> None:
    pool = WorkerPool(1)
    with pytest.raises(ValueError, match="has no packed form"):
        cpu.pack(RawTensor.from_tensor(torch.zeros(16, 32)), pool)
    with pytest.raises(ValueError, match="out must have shape"):
        cpu.pack(random_weight(QuantType.Q8_0, 16, 32), pool, out=torch.empty(3, dtype=torch.uint8))
    mixed = [cpu.pack(random_weight(QuantType.Q8_0, 32, 32), pool), random_weight(QuantType.Q8_0, 32, 32)]
    with pytest.raises(ValueError, match="give one type"):
        MoeKernel(ExpertWeights(None, mixed, mixed), ActivationSpec(), pool)
    pool.close()


def test_re_laid_weights_share_no_page_with_anything_else(pool):
    """A page of theirs may be pinned for a GPU, which must not touch other memory."""
    made = [cpu.empty_bytes(nbytes, pool) for nbytes in (1, 100, 4096, 5000) for _ in range(4)]
    pages = [{address // 4096 for address in (d.data_ptr(), d.data_ptr() + d.numel() - 1)} for d in made]
    assert len(set().union(*pages)) == sum(len(each) for each in pages)
    for data in made:
        start = data.untyped_storage().data_ptr()
        assert data.data_ptr() // 4096 * 4096 >= start
        assert -(-(data.data_ptr() + data.numel()) // 4096) * 4096 <= start + data.untyped_storage().nbytes()
