"""Weights, pools and guarded memory for the kernel tests."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from ktransformers.kernels.cpu import Isa, WorkerPool, available_isas
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import QuantType, RawTensor, row_bytes, type_size
from tests.support.checks.decoding import parts_of_rows, set_row_scales

MakeWeight = Callable[..., RawTensor]

DTYPES = {QuantType.F32: torch.float32, QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}


def scatter_scale(blocks: npt.NDArray[np.uint8], scale: npt.NDArray[np.float64]) -> None:
    """Write fp16 scales where blocks of IQ1_M have them: four bits at the top of each of four words."""
    bits = scale.astype(np.float16).view(np.uint16)
    for word in range(4):
        nibble = (bits >> 4 * word & 15).astype(np.uint8)
        blocks[:, 49 + 2 * word] = blocks[:, 49 + 2 * word] & 15 | nibble << 4


def random_weight(qtype: QuantType, *shape: int, seed: int = 0) -> RawTensor:
    """Random bits, with scales that are sane numbers of both signs; unquantized types get normal values."""
    rng = np.random.default_rng([seed, int(qtype), *shape])
    if qtype in DTYPES:
        return RawTensor.from_tensor(
            torch.from_numpy(rng.standard_normal(shape, dtype=np.float32) * 0.1).to(DTYPES[qtype])
        )
    rows = rng.integers(0, 256, (int(np.prod(shape[:-1])), row_bytes(qtype, shape[-1])), dtype=np.uint8)
    heads, by_row = parts_of_rows(rows, qtype)
    set_row_scales(heads, rng.uniform(1e-3, 1e-2, len(rows)) * rng.choice([-1, 1], len(rows)))
    blocks = by_row.reshape(-1, type_size(qtype))  # a view, where there is something to set
    if qtype is QuantType.MXFP4:
        blocks[:, 0] = rng.integers(115, 125, len(blocks))  # exponents: scales from 2^-13 to 2^-4
    if qtype is QuantType.IQ1_M:
        scatter_scale(blocks, rng.uniform(1e-3, 1e-2, len(blocks)) * rng.choice([-1, 1], len(blocks)))
    for at in FORMATS[qtype].halves:
        scale = rng.uniform(1e-3, 1e-2, len(blocks)) * rng.choice([-1, 1], len(blocks))
        blocks[:, at : at + 2] = scale.astype(np.float16).view(np.uint8).reshape(-1, 2)
    return RawTensor(torch.from_numpy(rows.reshape(-1)), qtype, shape)


@pytest.fixture(scope="session")
def make_weight() -> MakeWeight:
    return random_weight


@pytest.fixture(scope="session")
def pools() -> Iterator[list[WorkerPool]]:
    """One pool per tier and thread count, the scalar tier with one thread first. Products of AVX-VNNI are emulated
    where the processor has AVX2 without them."""
    isas = list(available_isas())
    if Isa.AVX2 in isas and Isa.AVX_VNNI not in isas:
        isas.insert(isas.index(Isa.AVX2), Isa.AVX_VNNI_EMULATED)
    made = [WorkerPool(threads, isa) for isa in isas for threads in (1, 2, 5)]
    yield made
    for pool in made:
        pool.close()


@pytest.fixture(scope="session")
def pool(pools: list[WorkerPool]) -> WorkerPool:
    """Two threads on the fastest tier."""
    return pools[-2]


class GuardedPages:
    """Memory that ends where a page without any access begins: one byte too far is a crash."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def copy_to_end(self, data: torch.Tensor) -> torch.Tensor:
        """The same uint8 bytes, the last of them just before the guard."""
        size = data.numel()
        span = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE * mmap.PAGESIZE
        memory = mmap.mmap(-1, span + mmap.PAGESIZE)
        self._maps.append(memory)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._libc.mprotect(ctypes.c_void_p(base + span), mmap.PAGESIZE, 0) != 0:
            raise OSError(ctypes.get_errno(), "mprotect failed")
        view = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=span - size)
        view.copy_(data)
        return view


@pytest.fixture(scope="session")
def guarded() -> GuardedPages:
    return GuardedPages()
