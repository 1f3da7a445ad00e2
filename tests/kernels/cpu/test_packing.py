"""Re-laying many matrices at once: the bytes that csrc/kernels/packed/packed.inl describes, whoever writes them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import Isa, WorkerPool
from ktransformers.kernels.cpu.topology import ThreadPlace
from ktransformers.kernels.types import Fp8Matrix, PackedTensor, QuantType, RawTensor, row_bytes, type_size

Bytes = npt.NDArray[np.uint8]


def random_blocks(qtype: QuantType, rows: int, cols: int, seed: int) -> RawTensor:
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows * row_bytes(qtype, cols),), dtype=torch.uint8, generator=generator)
    return RawTensor(data, qtype, (rows, cols))


def tiles_of_32(weight: RawTensor) -> Bytes:
    """What packed.inl says of Q8_0, Q4_0 and MXFP4, byte by byte."""
    rows, cols = weight.shape
    scale = 1 if weight.qtype is QuantType.MXFP4 else 2
    blocks = weight.data.numpy().reshape(rows, cols // 32, type_size(weight.qtype))
    out = []
    for first in range(0, rows, 16):
        tile = blocks[[min(first + r, rows - 1) for r in range(16)]]  # [16, blocks, bytes]
        head = tile[:, :, :scale].transpose(1, 0, 2).reshape(-1)
        out.append(np.pad(head, (0, -len(head) % 64)))
        for b in range(cols // 32):
            values = tile[:, b, scale:]
            if weight.qtype is not QuantType.Q8_0:
                values = np.concatenate([values & 15, values >> 4], axis=1)
            steps = values.reshape(16, 8, 4).transpose(1, 0, 2).reshape(8, 64)  # a line holds 4 columns of 16 rows
            out.append((steps if weight.qtype is QuantType.Q8_0 else steps[:4] | steps[4:] << 4).reshape(-1))
    return np.concatenate(out)


@pytest.mark.parametrize("isa", [*cpu.available_isas(), Isa.AMX_EMULATED])
@pytest.mark.parametrize("qtype", [QuantType.Q8_0, QuantType.Q4_0, QuantType.MXFP4])
@pytest.mark.parametrize("cols", [32, 64, 288])
def test_blocks_of_32_lie_as_they_are_described(isa: Isa, qtype: QuantType, cols: int) -> None:
    pool, weight = WorkerPool(2, isa), random_blocks(qtype, 37, cols, 1)
    assert np.array_equal(cpu.pack(weight, pool).data.numpy(), tiles_of_32(weight))
    pool.close()


def places(num_threads: int, num_nodes: int) -> list[ThreadPlace]:
    return [ThreadPlace(i * num_nodes // num_threads) for i in range(num_threads)]


@pytest.mark.parametrize(("num_threads", "num_nodes"), [(1, 1), (2, 1), (5, 1), (5, 2), (3, 3)])
@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q6_K, QuantType.MXFP4])
@pytest.mark.parametrize(("rows", "cols"), [(40, 512), (16, 256), (2100, 1024)])
def test_many_are_as_one_by_one(num_threads: int, num_nodes: int, qtype: QuantType, rows: int, cols: int) -> None:
    weights = [random_blocks(qtype, rows, cols, seed) for seed in range(3)]
    single, pool = WorkerPool(1), WorkerPool(num_threads, places=places(num_threads, num_nodes))
    made = cpu.pack_all(weights, pool)
    for one, weight in zip(made, weights, strict=True):
        assert isinstance(one, PackedTensor)
        assert one.shape == (rows, cols)
        assert torch.equal(one.data, cpu.pack(weight, single).data)
    addresses = [one.data.data_ptr() for one in made]
    assert addresses == [addresses[0] + i * made[0].nbytes for i in range(3)]
    single.close()
    pool.close()


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_many_of_fp8_are_as_one_by_one(num_threads: int) -> None:
    generator = torch.Generator().manual_seed(2)
    weights = [
        Fp8Matrix(
            torch.randint(0, 127, (300, 260), dtype=torch.uint8, generator=generator),
            torch.rand(3, 3, generator=generator),
        )
        for _ in range(3)
    ]
    single, pool = WorkerPool(1), WorkerPool(num_threads)
    for one, weight in zip(cpu.pack_all(weights, pool), weights, strict=True):
        assert torch.equal(one.data, cpu.pack_fp8(weight, single).data)
    single.close()
    pool.close()


def test_unlike_matrices_are_refused() -> None:
    pool = WorkerPool(1)
    first, other = random_blocks(QuantType.Q4_0, 16, 64, 1), random_blocks(QuantType.Q4_0, 16, 32, 1)
    with pytest.raises(ValueError, match=r"weights\[1\] is Q4_0 \[16, 32\], weights\[0\] is not"):
        cpu.pack_all([first, other], pool)
    with pytest.raises(ValueError, match=r"weights\[1\] is Q8_0 \[16, 64\], weights\[0\] is not"):
        cpu.pack_all([first, random_blocks(QuantType.Q8_0, 16, 64, 1)], pool)
    pool.close()


def steps_of(codes: Bytes) -> Bytes:
    """Codes [16, 256] as lines of 4 columns of 16 rows: [64, 64]."""
    return codes.reshape(16, 64, 4).transpose(1, 0, 2).reshape(64, 64)


def codes_of_256(block: Bytes, qtype: QuantType) -> Bytes:
    """The 256 codes of each of 16 blocks, as ggml has them: two runs of 32 columns in the same bytes."""
    if qtype is QuantType.Q6_K:
        halves = []
        for half in range(2):
            low, upper = block[:, 64 * half : 64 * half + 64], block[:, 128 + 32 * half : 160 + 32 * half]
            nibbles = [low[:, :32] & 15, low[:, 32:] & 15, low[:, :32] >> 4, low[:, 32:] >> 4]
            halves += [nibbles[part] | (upper >> 2 * part & 3) << 4 for part in range(4)]
        return np.concatenate(halves, axis=1)
    first = {QuantType.Q4_K: 16, QuantType.Q5_K: 48}[qtype]
    parts = []
    for part in range(8):
        nibbles = block[:, first + 32 * (part // 2) : first + 32 + 32 * (part // 2)] >> 4 * (part % 2) & 15
        fifth = block[:, 16:48] >> part & 1 if qtype is QuantType.Q5_K else np.zeros_like(nibbles)
        parts.append(nibbles | fifth << 4)
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("isa", [*cpu.available_isas(), Isa.AMX_EMULATED])
@pytest.mark.parametrize("qtype", [QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K])
def test_lines_of_256_lie_as_they_are_described(isa: Isa, qtype: QuantType) -> None:
    pool, weight = WorkerPool(1, isa), random_blocks(qtype, 16, 256, 5)
    made = cpu.pack(weight, pool).data.numpy()
    steps = steps_of(codes_of_256(weight.data.numpy().reshape(16, -1), qtype))
    head, scales = (64, 256) if qtype is QuantType.Q6_K else (0, 320)
    lines, upper = made[head + scales : head + scales + 2048].reshape(32, 64), made[head + scales + 2048 :]
    for g in range(4):
        for i in range(8):
            low, high = steps[16 * g + i], steps[16 * g + 8 + i]
            assert np.array_equal(lines[8 * g + i], low & 15 | (high & 15) << 4)
        if qtype is QuantType.Q5_K:
            for half in range(2):
                want = sum((steps[16 * g + 8 * half + i] >> 4) << i for i in range(8))
                assert np.array_equal(upper.reshape(8, 64)[2 * g + half], want)
        if qtype is QuantType.Q6_K:
            for i in range(4):
                want = sum((steps[16 * g + 4 * j + i] >> 4) << 2 * j for j in range(4))
                assert np.array_equal(upper.reshape(16, 64)[4 * g + i], want)
    assert len(upper) == {QuantType.Q4_K: 0, QuantType.Q5_K: 512, QuantType.Q6_K: 1024}[qtype]
    pool.close()
