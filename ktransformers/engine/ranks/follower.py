"""A process beside the leader: loads its part of the model, then runs the leader's steps until the leader is gone."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
from functools import reduce
from typing import Any, BinaryIO

import torch

from ktransformers.child import become, follow_parent, framed, read_frame
from ktransformers.engine.builder import Part, build_follower
from ktransformers.engine.cache_plan import SharedPages
from ktransformers.engine.opened import OpenedModel, open_model, open_synthetic
from ktransformers.engine.ranks.messages import Begin, Captured, Failed, Loaded, Start, Step, decode, encode
from ktransformers.engine.ranks.ranks import Follower
from ktransformers.errors import EngineError, KTransformersError
from ktransformers.logs import set_up_logging

__all__ = ["main"]

logger = logging.getLogger(__name__)


class _Pipes:
    """To the leader and from it. Whatever else this process prints goes to standard error."""

    def __init__(self) -> None:
        self._in: BinaryIO = sys.stdin.buffer
        self._out: BinaryIO = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # NCCL writes there by itself

    def read(self, kind: Any) -> Any:
        """The next message; None when the leader is gone."""
        data = read_frame(self._in)
        return None if data is None else decode(data, kind)

    def begin(self) -> Begin:
        """What comes behind Loaded. Raises EngineError when the leader is gone."""
        begin: Begin | None = self.read(Begin)
        if begin is None:
            raise EngineError("the leader is gone")
        return begin

    def say(self, message: Loaded | Captured | Failed) -> None:
        self._out.write(framed(encode(message)))
        self._out.flush()


def _open(start: Start) -> OpenedModel:
    if start.made is None:
        return open_model(start.config)
    from transformers import AutoConfig

    values: dict[str, Any] = json.loads(start.made.hf_config)
    return open_synthetic(start.config, AutoConfig.for_model(**values), start.made.routing)


def _build(start: Start, pipes: _Pipes) -> Part:
    module, _, name = start.hardware.partition(":")
    detect: Any = reduce(getattr, name.split("."), importlib.import_module(module))
    follower = Follower(start, pipes.begin, pipes.say)
    return build_follower(
        _open(start),
        follower,
        detect(start.config),
        SharedPages(start.page_size, start.max_batch_size, start.num_states > 0, start.num_states),
    )


@torch.inference_mode()
def main() -> int:
    """The process. Returns its exit code: 1 when the leader was told that it cannot load."""
    become("kt-rank")
    follow_parent()
    pipes = _Pipes()
    start: Start | None = pipes.read(Start)
    if start is None:
        return 0
    set_up_logging(start.log_level, start.name, with_time=True)
    try:
        part = _build(start, pipes)
    except KTransformersError as error:
        pipes.say(Failed(type(error).__name__, str(error)))
        return 1
    while (step := pipes.read(Step)) is not None:
        token_ids, positions, context, keep = step.inputs(part.cache, part.pool)
        part.runner.follow(token_ids, positions, context, keep, is_padded=step.is_padded)
    return 0
