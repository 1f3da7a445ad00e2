"""Rows of tables in files: those of the mapped table bit for bit, whatever is kept of them and whatever fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ktransformers.errors import FormatError, WeightError
from ktransformers.kernels.cpu import RowStore, WorkerPool, dequantize_rows
from ktransformers.kernels.cpu.expert_store import Extent, ReadError
from ktransformers.kernels.types import QuantType, RawTensor

MakeWeight = Callable[..., RawTensor]
PARTS, COLS = (300, 1, 699), 160  # rows of each part
LARGE = 1 << 20


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(2)
    yield made
    made.close()


class Table:
    """A table in two files, its first part beginning in the midst of one; and all of its rows in memory."""

    def __init__(self, folder: Path, make_weight: MakeWeight, pool: WorkerPool, qtype: QuantType = QuantType.Q8_0):
        parts = [make_weight(qtype, rows, COLS, seed=rows) for rows in PARTS]
        self.paths, self.extents = (folder / "first", folder / "second"), list[Extent]()
        for path, first, given in ((self.paths[0], 777, parts[:2]), (self.paths[1], 0, parts[2:])):
            with path.open("wb") as file:
                file.write(b"x" * first)
                for part in given:
                    self.extents.append(Extent(self.paths.index(path), file.tell(), part.nbytes))
                    file.write(part.data.numpy().tobytes())
        whole = RawTensor(torch.cat([part.data for part in parts]), qtype, (sum(PARTS), COLS))
        self.rows = dequantize_rows(whole, torch.arange(sum(PARTS)), pool)
        self.qtype, self.pool, self.row_nbytes = qtype, pool, parts[0].nbytes // PARTS[0]

    def store(self, cache_nbytes: int = LARGE) -> RowStore:
        return RowStore(self.paths, self.extents, self.qtype, COLS, self.pool, cache_nbytes)

    def check(self, store: RowStore, ids: Tensor) -> None:
        assert torch.equal(store.gather(ids), self.rows[ids])


@pytest.fixture
def table(tmp_path: Path, make_weight: MakeWeight, pool: WorkerPool) -> Table:
    return Table(tmp_path, make_weight, pool)


@pytest.fixture
def store(table: Table) -> Iterator[RowStore]:
    made = table.store()
    yield made
    made.close()


@pytest.mark.parametrize("qtype", [QuantType.BF16, QuantType.Q8_0, QuantType.IQ4_NL], ids=lambda one: one.name)
@pytest.mark.parametrize("cache_nbytes", [0, 20_000, LARGE])
def test_rows_are_those_of_the_table(
    cache_nbytes: int, qtype: QuantType, tmp_path: Path, make_weight: MakeWeight, pool: WorkerPool
) -> None:
    """Eight rows stay, about a hundred, and all. Calls of one row, and of more than are asked for at once."""
    table = Table(tmp_path, make_weight, pool, qtype)
    store = table.store(cache_nbytes)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 0, 16, 1, 10_000, 300):
        table.check(store, torch.randint(sum(PARTS), (count,), generator=generator))
    table.check(store, torch.tensor([0, 299, 300, 301, 999, 0]))
    out = torch.empty(2, COLS)
    assert store.gather(torch.tensor([5, 300]), out) is out
    assert torch.equal(out, table.rows[[5, 300]])
    hits, misses, nbytes, seconds, errors = store.counts()
    assert hits + misses == 1 + 16 + 1 + 10_000 + 300 + 6 + 2
    assert misses * 4096 <= nbytes <= 2 * misses * 4096
    assert (misses <= sum(PARTS)) == (cache_nbytes == LARGE)
    assert seconds > 0
    assert errors == 0
    store.close()
    assert store.counts() == (hits, misses, nbytes, seconds, errors)


def test_a_row_is_read_once(table: Table, store: RowStore) -> None:
    table.check(store, torch.tensor([7, 7, 400, 7]))
    assert store.counts()[:2] == (2, 2)
    table.check(store, torch.tensor([400, 7]))
    assert store.counts()[:2] == (4, 2)


def test_the_row_leaves_that_was_looked_up_longest_ago(table: Table) -> None:
    """One set of eight."""
    store = table.store(0)
    for row in (*range(8), 0, 8):
        table.check(store, torch.tensor([row]))
    assert store.counts()[:2] == (1, 9)
    table.check(store, torch.tensor([0, *range(2, 9)]))
    assert store.counts()[:2] == (9, 9)
    table.check(store, torch.tensor([1]))
    assert store.counts()[:2] == (9, 10)
    store.close()


def test_a_read_fails(table: Table, store: RowStore) -> None:
    table.check(store, torch.tensor([3]))
    store.handle._fail_next(1)
    ids = torch.tensor([3, 4, 4, 800])
    with pytest.raises(ReadError, match=f"({table.paths[0]}|{table.paths[1]}) cannot be read"):
        store.gather(ids)
    assert store.counts()[4] == 1
    table.check(store, ids)


def test_a_file_that_changes(table: Table, store: RowStore) -> None:
    path = table.paths[1]
    about, data = path.stat(), path.read_bytes()
    table.check(store, torch.tensor([500]))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    with pytest.raises(ReadError, match=f"{path} was written to since it was opened"):
        store.gather(torch.tensor([501]))
    os.truncate(path, 100)
    with pytest.raises(ReadError, match=f"{path} has 100 bytes and had {about.st_size} .*load the model again"):
        store.gather(torch.tensor([501]))
    table.check(store, torch.tensor([500, 2]))  # in memory, and in the other file
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    table.check(store, torch.tensor([501]))
    path.unlink()
    table.check(store, torch.tensor([502]))


def test_wrong_arguments_are_named(table: Table, store: RowStore) -> None:
    with pytest.raises(IndexError, match=r"ids\[1\] is 1000, but the table has 1000 rows"):
        store.gather(torch.tensor([4, 1000]))
    with pytest.raises(IndexError, match="-1"):
        store.gather(torch.tensor([-1]))
    with pytest.raises(TypeError):
        store.gather(torch.tensor([1], dtype=torch.int32))
    for extent in (Extent(0, 0, table.row_nbytes + 1), Extent(1, 0, 700 * table.row_nbytes), Extent(2, 0, 0)):
        with pytest.raises(FormatError, match="a table cannot be read from its files"):
            RowStore(table.paths, [extent], table.qtype, COLS, table.pool)
    with pytest.raises(WeightError, match="gone cannot be opened"):
        RowStore([table.paths[0].with_name("gone")], [], table.qtype, COLS, table.pool)


def test_closing_ends_a_call_that_waits(table: Table, store: RowStore) -> None:
    store.handle._hold(True)
    errors = list[str]()

    def run() -> None:
        try:
            store.gather(torch.tensor([1, 2]))
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    store.close()
    thread.join()
    assert errors == ["this RowStore is closed: make a new one"]
    with pytest.raises(RuntimeError, match="is closed"):
        store.gather(torch.tensor([1]))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="asks Linux about this process")
def test_nothing_is_left_behind(table: Table) -> None:
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    table.store().close()
    before = counts()
    store = table.store()
    table.check(store, torch.tensor([1]))
    assert counts() == (before[0] + 2, before[1] + 32)
    store.close()
    assert counts() == before
    store = table.store()
    del store
    assert counts() == before
