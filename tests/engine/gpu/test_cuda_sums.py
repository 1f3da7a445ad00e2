"""Sums over real GPUs, a process each: right to the bit, the same on all of them, captured and not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engines import sum_ranks
from tests.support.engines.sum_ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]


def reach_each_other() -> bool:
    return torch.cuda.can_device_access_peer(0, 1) and torch.cuda.can_device_access_peer(1, 0)


@pytest.mark.parametrize(
    "work",
    [
        sum_ranks.check_sums,
        sum_ranks.check_gathers,
        sum_ranks.check_captured,
        sum_ranks.check_captured_gathers,
        sum_ranks.check_products,
        sum_ranks.check_torch_kernels,
        sum_ranks.check_nccl,
    ],
    ids=lambda work: work.__name__,
)
def test_sums_of_two_gpus(work: sum_ranks.Work, tmp_path: Path) -> None:
    run_ranks(2, tmp_path, work)


@pytest.mark.skipif(torch.cuda.device_count() < 2 or not reach_each_other(), reason="GPUs without access to each other")
def test_gpus_that_reach_each_other_add_up_in_their_memory(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, sum_ranks.check_way)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
def test_sums_of_four_gpus(tmp_path: Path) -> None:
    run_ranks(4, tmp_path, sum_ranks.check_sums)
