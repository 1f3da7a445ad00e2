"""Hidden states from one stage to the next: torch.distributed, NCCL between two GPUs and else gloo, in fp32."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from typing_extensions import override

from ktransformers.engine.parallel.pipeline.network import local_interface
from ktransformers.errors import StageLostError
from ktransformers.kernels.triton.common.compiling import is_warmup
from ktransformers.operators.partial_sums import Placeholder

__all__ = ["Incoming", "Outgoing", "StageLink", "gpu_number", "joined_stages"]

logger = logging.getLogger(__name__)

_SECONDS = 1800.0
"""Until all have met, and until a stage has heard of a step from the one before."""


class StageLink:
    """The connection between a stage and its neighbours. stage: its number, of `size`; the last one leads, and is rank
    0.

    seed: of hidden states that nobody has computed. has_gpu_groups: whether hidden states go from GPU to GPU anywhere,
    where nothing can take back what waits. replayed_rows: most rows of steps that are replayed, whose hidden
    states are kept in memory of their own: the model that keeps them runs only while its graphs are captured.
    """

    def __init__(self, stage: int, size: int):
        self.stage, self.size = stage, size
        self._is_met, self.seed, self.has_gpu_groups = False, 0, False
        self.replayed_rows = 0
        self._replayed: torch.Tensor | None = None  # fp32 [1, replayed_rows, width]
        self._kept = torch.empty(0)  # of a step of more rows
        self._device = torch.device("cpu")
        self._groups: dict[int, Any] = {}  # of NCCL, by the stage that gives, where both are on GPUs

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.size - 1

    def _rank(self, stage: int) -> int:
        return (stage + 1) % self.size

    def rendezvous(self, place: str, device: torch.device) -> None:
        """Wait for all other stages. place: a file that nobody else has, or tcp://HOST:PORT. device: where hidden
        states come in. Raises RuntimeError."""
        made: Any = distributed
        seconds = datetime.timedelta(seconds=_SECONDS)
        if place.startswith("tcp://"):
            host, _, port = place.removeprefix("tcp://").rpartition(":")
            interface = local_interface(host)
            store = made.TCPStore(host, int(port), self.size, False, seconds)
        else:
            interface, store = "lo", made.FileStore(place, self.size)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
        distributed.init_process_group(
            "gloo",
            store=store,
            rank=self._rank(self.stage),
            world_size=self.size,
            timeout=seconds,
        )
        self._join_gpus(device)
        self._is_met = True

    def _join_gpus(self, device: torch.device) -> None:
        """Groups of NCCL for neighbours whose hidden states need not cross host memory; all stages make all of them."""
        mine = torch.tensor([gpu_number(device)])
        found = [torch.zeros_like(mine) for _ in range(self.size)]
        distributed.all_gather(found, mine)
        numbers = [int(found[self._rank(stage)]) for stage in range(self.size)]
        joined = joined_stages(numbers)
        self.has_gpu_groups = bool(joined)
        if joined and device.type == "cuda":
            torch.cuda.set_device(device)
            self._device = device
        for stage in joined:
            made = distributed.new_group([self._rank(stage), self._rank(stage + 1)], backend="nccl")
            if self.stage in (stage, stage + 1):
                self._groups[stage] = made
        if self._groups:
            logger.info("hidden states go from GPU to GPU, by NCCL")

    def receive(self, num_rows: int, width: int) -> torch.Tensor:
        """Receive rows of the step, fp32 [1, num_rows, width], as the stage before gives them; until all have met, and
        in a warm-up, of which no other stage knows, those that follow from `seed`. Raises StageLostError."""
        if not self._is_met or is_warmup():
            return torch.randn(1, num_rows, width, generator=torch.Generator().manual_seed(self.seed))
        group = self._groups.get(self.stage - 1)
        rows = torch.empty(1, num_rows, width, device="cpu" if group is None else self._device)
        with _carrying(f"from stage {self.stage}"):
            distributed.recv(rows, self._rank(self.stage - 1), group=group)
        return rows

    def keep(self, rows: torch.Tensor) -> None:
        """Keep hidden states of a step, [1, T, width], which `send` gives away."""
        count = rows.shape[1]
        if count > self.replayed_rows:
            self._kept = rows
            return
        if self._replayed is None:  # before anything is captured: what is captured runs once before
            shape = (1, self.replayed_rows, rows.shape[2])
            self._replayed = torch.empty(shape, dtype=torch.float32, device=rows.device)
        self._replayed[:, :count].copy_(rows)

    def send(self, num_rows: int) -> None:
        """Give the first rows of the last step, which may be padded, to the next stage. Raises StageLostError."""
        group = self._groups.get(self.stage)
        if num_rows > self.replayed_rows or self._replayed is None:
            rows, self._kept = self._kept, torch.empty(0)
        else:
            rows = self._replayed
        where = torch.device("cpu") if group is None else self._device
        rows = rows[:, :num_rows].to(where, torch.float32).contiguous()
        with _carrying(f"to stage {self.stage + 2}"):
            distributed.send(rows, self._rank(self.stage + 1), group=group)

    def leave(self) -> None:
        """Leave the process group of the stages."""
        if self._is_met:
            self._is_met = False
            self._groups.clear()
            distributed.destroy_process_group()


@contextmanager
def _carrying(way: str) -> Iterator[None]:
    """way: counted from 1, as people do."""
    try:
        yield
    except RuntimeError as error:  # of torch.distributed
        reason = str(error).partition("\n")[0].rpartition("] ")[2]  # without a line of torch's sources
        raise StageLostError(f"hidden states did not come {way}, which is gone or has lost others: {reason}") from error


def gpu_number(device: torch.device) -> int:
    """A positive number that no other GPU of any machine has; 0 for what is no GPU."""
    if device.type != "cuda":
        return 0
    digest = hashlib.sha256(str(torch.cuda.get_device_properties(device).uuid).encode()).digest()
    return int.from_bytes(digest[:7], "little") + 1


def joined_stages(numbers: Sequence[int]) -> list[int]:
    """Stages that give hidden states to the next one by NCCL: both are on GPUs, and not on the same one, which NCCL
    refuses. numbers: `gpu_number` of each stage."""
    pairs = enumerate(itertools.pairwise(numbers))
    return [stage for stage, (one, other) in pairs if one and other and one != other]


class Incoming(Placeholder):
    """The placeholder for the embedding, which gives the hidden states of the stage before, [1, T, width].

    num_streams: of hidden states, side by side.
    """

    def __init__(self, link: StageLink, embedding: nn.Module, num_streams: int = 1):
        super().__init__()
        self.link = link
        rows, width = embedding.get_parameter("weight").shape
        self.weight = torch.empty(rows, num_streams * width, device="meta")  # whose width others ask for

    @override
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.link.receive(input_ids.shape[-1], self.weight.shape[-1])


class Outgoing(Placeholder):
    """The placeholder for the last norm, or for what makes one stream of several, [1, T, streams, H], before it.

    Who runs the model has the link hand over what this keeps.
    """

    def __init__(self, link: StageLink):
        super().__init__()
        self.link = link

    @override
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.link.keep(hidden_states.flatten(2))
        return hidden_states if hidden_states.dim() == 3 else hidden_states[:, :, 0]
