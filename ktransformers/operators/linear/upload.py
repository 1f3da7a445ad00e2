"""Brings bytes of weights to a GPU while the next ones are read.

Knows devices and memory; neither formats nor modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import WorkerPool

__all__ = ["upload"]

_PIECE = 32 << 20
"""Bytes that are copied to a GPU at once: far more than a copy's own cost, and little memory to pin."""


def upload(parts: Sequence[torch.Tensor], device: torch.device, pool: WorkerPool) -> torch.Tensor:
    """Copy uint8 `parts` side by side to a new tensor [bytes] on the device, perhaps still on their way on its stream.

    All threads of the pool read the parts, those of mapped files from the file. They pass through pinned memory, which
    torch gives to another piece when the copy out of it is done, so that the one is copied while the next is read.
    """
    out = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
    if device.type == "cpu":
        return cpu.copy_parts(parts, pool, out)
    at = 0
    for some in _pieces(parts):
        staged = torch.empty(sum(part.nbytes for part in some), dtype=torch.uint8, pin_memory=device.type == "cuda")
        cpu.copy_parts(some, pool, staged)
        out[at : at + staged.nbytes].copy_(staged, non_blocking=True)
        at += staged.nbytes
    return out


def _pieces(parts: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The same bytes in the same order, _PIECE at a time."""
    some, room = list[torch.Tensor](), _PIECE
    for part in parts:
        rest = part.reshape(-1)
        while rest.nbytes >= room:
            yield [*some, rest[:room]]
            some, rest, room = [], rest[room:], _PIECE
        if rest.nbytes:
            some.append(rest)
            room -= rest.nbytes
    if some:
        yield some
