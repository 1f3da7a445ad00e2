"""A process beside the driver: loads its part of the model, then runs the driver's steps until the driver is gone."""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import sys
import threading
from functools import reduce
from typing import Any, BinaryIO

import torch

from ktransformers.engine.load.builder import LoadedPart, build_worker
from ktransformers.engine.model.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.parallel.ranks.messages import (
    Begin,
    Captured,
    Failed,
    Loaded,
    Regroup,
    Start,
    Step,
    decode,
    encode,
)
from ktransformers.engine.parallel.ranks.ranks import Worker
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.errors import KTransformersError, StageLostError, reason_of
from ktransformers.system.child import become, follow_parent, framed, read_frame
from ktransformers.system.logs import set_up_logging

__all__ = ["main"]

logger = logging.getLogger(__name__)


class _Pipes:
    """To the driver and from it. Whatever else this process prints goes to standard error.

    Messages are taken in at once, by a thread: a driver that waits until a step of many tokens is read does not take
    the hidden states that this process waits to hand over. Without its driver the process ends, whatever it is doing.
    """

    def __init__(self) -> None:
        self._in: BinaryIO = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        self._out: BinaryIO = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NCCL writes there by itself
        self._frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._take_in, name="driver", daemon=True).start()

    def _take_in(self) -> None:
        try:
            while (data := read_frame(self._in)) is not None:
                self._frames.put(data)
            logger.debug("the driver is gone")
        except OSError as error:
            logger.debug("the connection to the driver is gone: %s", reason_of(error))
        logging.shutdown()
        os._exit(0)

    def read(self, kind: Any) -> Any:
        """Return the driver's next message."""
        return decode(self._frames.get(), kind)

    def begin(self) -> Begin:
        """Return the message that the driver sends after Loaded."""
        begin: Begin = self.read(Begin)
        return begin

    def send(self, message: Loaded | Captured | Failed) -> None:
        self._out.write(framed(encode(message)))
        self._out.flush()


def _open(start: Start) -> OpenedModel:
    if start.made is None:
        return open_model(start.config)
    from transformers import AutoConfig

    values: dict[str, Any] = json.loads(start.made.hf_config)
    return open_synthetic(start.config, AutoConfig.for_model(**values), start.made.routing)


def _build(start: Start, worker: Worker) -> LoadedPart:
    module, _, name = start.hardware.partition(":")
    detect: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    hardware: Hardware = detect(start.config)
    return build_worker(
        _open(start),
        worker,
        hardware.within(start.memory_budget) if start.memory_budget else hardware,
        CachePlan(start.max_batch_size, start.page_size, start.num_states > 0, start.num_states),
    )


@torch.inference_mode()
def main() -> int:
    """Run the process of a worker: load its part of the model, then run the driver's steps. Returns 1 when the driver
    was told that it cannot load, and else ends with the driver."""
    become("kt-rank")
    follow_parent()
    pipes = _Pipes()
    start: Start = pipes.read(Start)
    set_up_logging(start.log_level, start.name, with_time=True)
    try:
        worker = Worker(start, pipes.begin, pipes.send)
        part = _build(start, worker)
    except KTransformersError as error:
        pipes.send(Failed(type(error).__name__, str(error)))
        return 1
    is_lost, blocks = False, worker.step_blocks
    while True:
        step = None if blocks is None else blocks.wait()
        if step is not None and step.rows:
            part.runner.follow_shared(step)
            continue
        message: Step | Regroup = pipes.read(Step | Regroup)
        if isinstance(message, Regroup):
            worker.rendezvous_again(message.place)
            is_lost = False
        elif not is_lost:
            batch = message.batch(part.cache, part.pool)
            try:
                part.runner.follow(batch, is_padded=message.is_padded)
            except StageLostError as error:
                logger.debug("%s", error)
                is_lost = True
                worker.close()  # so that those who wait for this one hear of it
