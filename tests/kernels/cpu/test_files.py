"""What is packed or copied once is read from its file, whose map stays out of this process's memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool, pages
from ktransformers.kernels.types import Fp8Matrix, PackedTensor, QuantType, RawTensor, row_bytes
from ktransformers.weights.mapped_file import map_file
from tests.support.checks.mapped_memory import cached_bytes, mapped_bytes, settled

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about this process")

ROWS, COLS = 300, 1024
NBYTES = ROWS * row_bytes(QuantType.Q8_0, COLS)


def random_file(path: Path, nbytes: int, seed: int = 1) -> torch.Tensor:
    """Writes and maps it."""
    generator = torch.Generator().manual_seed(seed)
    path.write_bytes(torch.randint(0, 120, (nbytes,), dtype=torch.uint8, generator=generator).numpy().tobytes())
    return map_file(path)


def open_files(path: Path) -> int:
    found = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return sum(os.path.exists(one) and os.readlink(one) == str(path) for one in found)


def pack_raw(data: torch.Tensor, pool: WorkerPool) -> PackedTensor:
    return cpu.pack(RawTensor(data, QuantType.Q8_0, (ROWS, COLS)), pool)


def pack_codes(data: torch.Tensor, pool: WorkerPool) -> PackedTensor:
    values = data[: ROWS * COLS].view(ROWS, COLS)
    return cpu.pack_fp8(Fp8Matrix(values, torch.ones(-(-ROWS // 128), COLS // 128)), pool)


@linux_only
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("pack", [pack_raw, pack_codes])
def test_what_is_packed_does_not_pass_through_the_map(
    num_threads: int, pack: Callable[[torch.Tensor, WorkerPool], PackedTensor], tmp_path: Path
) -> None:
    pool, path = WorkerPool(num_threads), tmp_path / "weights"
    data = random_file(path, NBYTES + 777)[777:]  # tensors of a file begin anywhere
    made = pack(data, pool)
    assert mapped_bytes(path) == 0
    assert torch.equal(made.data, pack(data.clone(), pool).data)
    assert mapped_bytes(path) >= NBYTES  # the copy to compare with did
    pool.close()


@linux_only
def test_parts_are_copied_side_by_side(tmp_path: Path) -> None:
    pool, paths = WorkerPool(2), [tmp_path / "one", tmp_path / "two"]
    one, two = (random_file(path, 3_000_000, seed) for seed, path in enumerate(paths))
    ours = torch.arange(100, dtype=torch.uint8)
    parts = [two[5:2_000_005], ours, one[:0], one[2_999_999:], one, ours.view(10, 10)]
    out = torch.zeros(sum(part.numel() for part in parts), dtype=torch.uint8)
    assert cpu.copy_parts(parts, pool, out) is out
    assert [mapped_bytes(path) for path in paths] == [0, 0]
    assert torch.equal(out, torch.cat([part.reshape(-1) for part in parts]))
    with pytest.raises(ValueError, match="out must have shape"):
        cpu.copy_parts(parts, pool, out[1:])
    with pytest.raises(ValueError, match=r"parts\[1\] must be contiguous"):
        cpu.copy_parts([ours, ours.view(10, 10).T], pool, out[:200])
    pool.close()


@linux_only
def test_a_file_is_closed_with_its_last_view(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    before, view = open_files(path), random_file(path, 10_000)[5000:]
    assert open_files(path) > before
    del view
    gc.collect()
    assert open_files(path) == before == 0


def test_a_file_that_became_shorter_is_an_error(tmp_path: Path) -> None:
    pool, path = WorkerPool(2), tmp_path / "weights"
    data = random_file(path, NBYTES)
    os.truncate(path, NBYTES // 2)
    with pytest.raises(RuntimeError, match="has become shorter while it was read; load it again"):
        pack_raw(data, pool)
    with pytest.raises(RuntimeError, match="has become shorter"):
        cpu.copy_parts([data], pool, torch.empty(NBYTES, dtype=torch.uint8))
    pool.close()


def test_times_grow_with_what_is_packed() -> None:
    pool, before = WorkerPool(1), cpu.pack_times()
    pack_raw(torch.zeros(NBYTES, dtype=torch.uint8), pool)
    assert cpu.pack_times()[0] >= before[0]
    assert cpu.pack_times()[1] > before[1]
    pool.close()


@linux_only
@pytest.mark.parametrize("is_dropped", [False, True])
def test_what_was_packed_leaves_the_systems_cache_where_that_is_short(is_dropped: bool, tmp_path: Path) -> None:
    pool, path = WorkerPool(2), tmp_path / "weights"
    whole = random_file(path, NBYTES + 1000)
    settled(path)
    raw = RawTensor(whole[1000:], QuantType.Q8_0, (ROWS, COLS))
    with pages.without_cache(is_dropped):
        assert pages.is_cache_dropped() == is_dropped
        cpu.pack(raw, pool)
        cpu.let_go([raw])
    assert not pages.is_cache_dropped()
    assert cached_bytes(path) == (2 if is_dropped else -(-whole.numel() // pages.PAGE)) * pages.PAGE
    assert int(whole[1000]) < 120  # it can still be read
    pool.close()
