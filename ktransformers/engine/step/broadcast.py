"""How a step comes to the other processes of a model before it runs: as a message, or in memory that they share.

A step whose graph all processes have comes in memory: the inputs of the graph as one block of bytes, which each of them
copies to its device before it launches the graph of that size. All other steps come as messages (parallel/ranks); where
there is shared memory, a block without a size says that the next step is one, so that steps keep their order:

    driver                                     worker
      writes the inputs to slot n % 2            waits for block n: polls while a step is likely, then sleeps
      publishes block n ────────────────────>    copies slot n % 2 to its device, launches the graph
      copies slot n % 2 to its device            waits for the end of both, then for block n + 1
      launches the graph, waits for its end

Who waits on what: a worker waits for a block, and for its own GPU, so that it is through with a block when it waits for
the next one. The driver waits for its own GPU, whose sums wait for the workers' shares: it is hardly ever a step ahead,
never more than two (system/shared_blocks.py), and workers finish what it has launched without it. A process that ends
is noticed where its pipe is (ranks/worker_group.py, and load/worker.py for the driver's end), as without shared memory;
a driver that waits for a worker asks for that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ktransformers.engine.step.context import ForwardBatch
from ktransformers.system.shared_blocks import SharedBlocks

__all__ = ["SharedStep", "StepBlocks", "StepBroadcast"]

logger = logging.getLogger(__name__)

StepBroadcast = Callable[[ForwardBatch, bool], None]
"""Called with a step, and whether it is padded."""


class SharedStep(NamedTuple):
    """A step in shared memory: the slot of its inputs, the size of its graph, and its rows that hold tokens. rows: 0
    for a step that comes as a message."""

    slot: int
    rows: int
    seqs: int
    kept: int
    num_tokens: int


class StepBlocks:
    """The memory in which steps' inputs come to the other processes of a model, as one of them has it.

    device: where the inputs are copied to. check: raises EngineError when a process is gone; called before a step is
    published.
    """

    def __init__(self, blocks: SharedBlocks, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self._blocks, self._device, self._check = blocks, device, check
        self._slots: list[torch.Tensor] = []
        self._pinned: list[int] = []  # addresses

    def slots(self, nbytes: int) -> list[torch.Tensor]:
        """Return the slots, uint8 [nbytes] each, pinned where they are copied to a GPU. All processes ask for as many
        bytes, each time."""
        if not self._slots:
            self._slots = [torch.frombuffer(slot, dtype=torch.uint8) for slot in self._blocks.reserve(nbytes)]
            if self._device.type == "cuda":
                self._pin()
        assert len(self._slots[0]) >= nbytes, "slots are as large as they were asked for first"
        return [slot[:nbytes] for slot in self._slots]

    def _pin(self) -> None:
        made: Any = torch.cuda  # parts of it have no types
        cudart = made.cudart()
        for slot in self._slots:
            code = int(cudart.cudaHostRegister(slot.data_ptr(), slot.nbytes, 0))
            if code:
                logger.warning("inputs of steps are not pinned, and take longer to copy: CUDA error %d", code)
            else:
                self._pinned.append(slot.data_ptr())

    def begin(self) -> int:
        """Return the slot of the next step, which nobody reads any more. Raises EngineError when a process is gone."""
        self._check()
        return self._blocks.begin(self._check)

    def publish(self, rows: int, seqs: int, kept: int, num_tokens: int) -> None:
        """Let the other processes run the step whose inputs are in the slot that was begun, see SharedStep."""
        self._blocks.publish((rows, seqs, kept, num_tokens))

    def publish_message(self) -> None:
        """Let the other processes run the step that was sent to them as a message. Errors as `begin`."""
        self.begin()
        self._blocks.publish((0, 0, 0, 0))

    def wait(self) -> SharedStep:
        """Wait for the driver's next step. What came with the one before may be overwritten."""
        slot, numbers = self._blocks.wait()
        return SharedStep(slot, *numbers)

    def unpin(self) -> None:
        """Unpin the slots: no step may be under way."""
        made: Any = torch.cuda
        while self._pinned:
            made.cudart().cudaHostUnregister(self._pinned.pop())
