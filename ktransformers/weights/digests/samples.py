"""Digests of some bytes of a model's weights: they tell models of one shape apart without reading them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from ktransformers.kernels.cpu.pages import few_bytes
from ktransformers.weights.source import WeightSource

__all__ = ["digest_of", "samples", "tensor_sizes"]

SAMPLED_TENSORS = 1024
"""Stored tensors of which some bytes are read: a page of each, some 0.1 s from a cold disk, nothing once loaded."""

SAMPLE_BYTES = 256


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return the digest of pieces, each with its length, in hexadecimal digits."""
    made = hashlib.blake2b(digest_size=32)
    for piece in pieces:
        made.update(len(piece).to_bytes(8, "little"))
        made.update(piece)
    return made.hexdigest()


def tensor_sizes(source: WeightSource) -> Iterator[bytes]:
    """Yield the name and the bytes of each stored tensor."""
    for name in sorted(source.stored_names()):
        data = source.stored_bytes(name)
        yield f"{name} {0 if data is None else data.numel()}".encode()


def samples(source: WeightSource) -> Iterator[bytes]:
    """Yield some bytes from the middle of stored tensors, up to SAMPLED_TENSORS of them."""
    names = sorted(source.stored_names())
    stride = max(-(-len(names) // SAMPLED_TENSORS), 1)
    for name in names[::stride]:
        data = source.stored_bytes(name)
        if data is not None:
            middle = max((data.numel() - SAMPLE_BYTES) // 2, 0)
            yield few_bytes(data[middle : middle + SAMPLE_BYTES])
