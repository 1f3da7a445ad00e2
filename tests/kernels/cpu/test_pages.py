"""Pages of files leave this process when they were read, not the system's cache; memory that is in no file stays."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch

from ktransformers.kernels.cpu import pages
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
