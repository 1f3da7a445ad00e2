"""Counts the kernels that a forward launches, by name: Triton's, and the operations of torch that compute something.

On a CPU torch has no launches to count, so operations are looked at instead: one that makes a view or empty memory
launches nothing on a GPU, any other one kernel. Knows no models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ktransformers.kernels.triton.common import runtime

EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def storages(values: Any) -> set[int]:
    return {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)}


class _Operations(TorchDispatchMode):
    def __init__(self, counts: Counter[str]):
        super().__init__()
        self.counts, self.is_paused = counts, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        is_view = not func._schema.is_mutable and storages(result) <= storages((args, kwargs))
        if not self.is_paused and not is_view and name not in EMPTY:
            self.counts[f"torch {name}"] += 1
        return result


@contextmanager
def counted_launches(monkeypatch: Any) -> Iterator[Counter[str]]:
    """Names of what is launched inside the block, and how often."""
    counts: Counter[str] = Counter()
    operations = _Operations(counts)
    if runtime.is_interpreted():
        from triton.runtime.interpreter import GridExecutor as Launcher

        method = "__call__"
    else:
        from triton.runtime import JITFunction as Launcher

        method = "run"
    original = getattr(Launcher, method)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts[self.fn.__name__] += 1
        before, operations.is_paused = operations.is_paused, True  # the interpreter computes with torch itself
        try:
            return original(self, *args, **kwargs)
        finally:
            operations.is_paused = before

    with monkeypatch.context() as patch, operations:
        patch.setattr(Launcher, method, launch)
        yield counts
