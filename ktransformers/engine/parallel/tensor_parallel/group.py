"""The processes that a model is cut over, as operators see them: results are put together by one of the ways of
collectives.py.

All are processes of one machine, started by the driver: they find each other by a file in a private folder, and speak
over the loopback interface.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from ktransformers.engine.parallel.tensor_parallel.collectives import Collectives, open_collectives
from ktransformers.kernels.triton.common.compiling import is_warmup
from ktransformers.operators.partial_sums import RankGroup, ShareProduct

__all__ = ["TensorGroup"]

_RENDEZVOUS_SECONDS = 1800.0
"""Until all have met: the slowest may read its weights from a disk."""


class TensorGroup(RankGroup):
    """The RankGroup of torch.distributed. Until `rendezvous` nothing is put together: what runs while a model is loaded
    is each process's own."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._num_values = 0
        self._collectives: Collectives | None = None  # until all have met

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def reserve(self, num_rows: int, width: int) -> None:
        """Make room for shares of up to [num_rows, width], see RankGroup."""
        self._num_values = num_rows * width

    def rendezvous(self, file: Path, device: torch.device) -> None:
        """Wait for all other processes, which give the same file, that nobody else may have. Raises RuntimeError."""
        is_gpu = device.type == "cuda"
        os.environ.setdefault("NCCL_SOCKET_IFNAME" if is_gpu else "GLOO_SOCKET_IFNAME", "lo")
        if is_gpu:
            torch.cuda.set_device(device)
        distributed.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=_store(file, self._size),
            rank=self._rank,
            world_size=self._size,
            timeout=datetime.timedelta(seconds=_RENDEZVOUS_SECONDS),
        )
        distributed.all_reduce(torch.zeros(1, device=device))  # connects, which no graph can while it is captured
        self._collectives = open_collectives(self._num_values, device, self._rank, self._size)

    def sum(self, share: torch.Tensor) -> torch.Tensor:
        """Add `share` up over all processes, see RankGroup."""
        sums = self._current
        if sums is not None:
            sums.add(share, share)
        return share

    def sum_product(self, x: torch.Tensor, width: int, product: ShareProduct) -> torch.Tensor:
        """Add the product with `x` up over all processes, see RankGroup."""
        sums = self._current
        if sums is None:
            return product(x, None).to(x.dtype)
        out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
        sums.add(product(x, sums.memory(len(x), width)), out)
        return out

    def gather_product(self, x: torch.Tensor, width: int, product: ShareProduct) -> torch.Tensor:
        """Put the products with `x` of all processes side by side, see RankGroup. Before all have met they are this
        process's own, as often."""
        sums = self._current
        if sums is None:
            return product(x, None).repeat(1, self._size)
        out = torch.empty(len(x), self._size * width, dtype=torch.float32, device=x.device)
        sums.gather(product(x, sums.memory(len(x), width)), out)
        return out

    @property
    def _current(self) -> Collectives | None:
        """The way to add up and to gather; None before all have met, and in a warm-up, which launches nothing."""
        return None if is_warmup() else self._collectives

    def leave(self) -> None:
        """Leave the group of processes."""
        if self._collectives is not None:
            self._collectives = None
            distributed.destroy_process_group()


def _store(file: Path, size: int) -> Any:
    made: Any = distributed
    return made.FileStore(str(file), size)
