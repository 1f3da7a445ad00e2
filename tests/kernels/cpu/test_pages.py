"""Pages of files leave this process when they were read, not the system's cache; memory that is in no file stays."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.disk.counters import drop_cache
from ktransformers.kernels.cpu import pages
from ktransformers.weights.digests.samples import samples
from ktransformers.weights.mapped_file import map_file
from tests.support.checks.mapped_memory import cached_bytes, mapped_bytes

NBYTES = 8 << 20

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about pages")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    with path.open("wb") as written:
        written.write(bytes(range(256)) * (NBYTES // 256))
        written.flush()
        os.fsync(written.fileno())  # pages that are not on the disk yet stay in the cache whatever happens
    return path


@linux_only
def test_what_was_read_leaves_the_process_and_stays_in_the_cache(file: Path) -> None:
    data = map_file(file)
    want = int(data.to(torch.int64).sum())
    assert mapped_bytes(file) == NBYTES
    halves = data[: NBYTES // 2], data[NBYTES // 2 :]
    pages.page_out(halves)
    assert mapped_bytes(file) == 0
    assert cached_bytes(file) == NBYTES
    assert int(data.to(torch.int64).sum()) == want


def test_memory_that_is_in_no_file_keeps_its_values() -> None:
    ours = torch.arange(NBYTES, dtype=torch.int32).view(torch.uint8)
    want = ours.clone()
    pages.page_out([ours, ours[: NBYTES // 2]])
    pages.read_ahead(ours)
    assert torch.equal(ours, want)


def test_a_mapping_is_forgotten_with_its_last_view(file: Path) -> None:
    view = map_file(file)[: pages.PAGE]
    address = view.data_ptr()
    assert pages._mappings[address] == NBYTES
    del view
    gc.collect()
    assert address not in pages._mappings


def empty_cache(file: Path) -> None:
    drop_cache(file)
    if cached_bytes(file):
        pytest.skip(f"the cache of the file system under {file.parent} cannot be emptied")


@linux_only
def test_few_bytes_bring_their_own_pages_into_the_cache(file: Path) -> None:
    """And nothing around them, as a page fault does elsewhere."""
    data = map_file(file)
    empty_cache(file)
    for at in (NBYTES // 3, NBYTES // 2 - 100):  # in one page, over the border of two
        assert pages.few_bytes(data[at : at + 256]) == bytes((at + i) % 256 for i in range(256))
    assert cached_bytes(file) == 3 * pages.PAGE
    assert pages.few_bytes(data[5:9].clone()) == bytes([5, 6, 7, 8])


@linux_only
def test_samples_of_tensors_read_a_page_of_each(file: Path) -> None:
    class Source:
        data = map_file(file)

        def stored_names(self) -> list[str]:
            return ["a", "b", "c", "d"]

        def stored_bytes(self, name: str) -> torch.Tensor:
            quarter = NBYTES // 4
            return self.data["abcd".index(name) * quarter :][:quarter]

    source = Source()
    empty_cache(file)
    assert len(list(samples(source))) == 4  # type: ignore[arg-type]
    assert cached_bytes(file) <= 8 * pages.PAGE
