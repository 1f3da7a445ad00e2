"""The process that loaded a model: a process forked from it has a copy of its memory and none of its threads."""

from __future__ import annotations

import gc
import os
import sys

from ktransformers.errors import EngineError

__all__ = ["OwnerProcess", "return_memory"]


class OwnerProcess:
    """Remembers the process that loaded a model. Whatever waits for the model's threads asks `require` first."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is still the process that loaded the model, and not one that was forked from it."""
        return os.getpid() == self._pid

    def require(self) -> None:
        """Raise EngineError in a process that was forked from the one that loaded the model."""
        if not self.is_here:
            raise EngineError(
                f"this model was loaded by process {self._pid}, and this is process {os.getpid()}, forked from it, "
                "where the model's threads do not run: load the model after the fork (gunicorn without --preload, "
                "Celery's worker_process_init), or start processes with multiprocessing's `spawn`"
            )


def return_memory() -> None:
    """Return a closed model's memory to the system: modules and hooks hold each other, which takes a collection."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
