"""Adds tensors up over the processes of a model: torch.distributed, NCCL where they are on GPUs, else gloo.

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

from ktransformers.kernels.triton.common.compiling import is_warmup
from ktransformers.operators.partial_sums import RankGroup

__all__ = ["TensorGroup"]

_MEETING_SECONDS = 1800.0
"""Until all have met: the slowest may read its weights from a disk."""


class TensorGroup(RankGroup):
    """The RankGroup of torch.distributed. Until `rendezvous` nothing is added: what runs while a model is loaded is
    each process's own."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size
        self._is_met = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

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
            timeout=datetime.timedelta(seconds=_MEETING_SECONDS),
        )
        distributed.all_reduce(torch.zeros(1, device=device))  # connects, which no graph can while it is captured
        self._is_met = True

    def sum(self, share: torch.Tensor) -> torch.Tensor:
        """Add `share` up over all processes, in place, see RankGroup."""
        if self._is_met and not is_warmup():
            distributed.all_reduce(share)
        return share

    def leave(self) -> None:
        """Leave the group of processes."""
        if self._is_met:
            self._is_met = False
            distributed.destroy_process_group()


def _store(file: Path, size: int) -> Any:
    made: Any = distributed
    return made.FileStore(str(file), size)
