"""A model's own files as the place of its experts, where these are blocks that kernels read or pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu.expert_store import Extent
from ktransformers.kernels.types import RawTensor
from ktransformers.weights.mapped_file import place_in_file
from ktransformers.weights.source import MappedExperts

__all__ = ["extent_of", "mapped_extents"]


def mapped_extents(experts: MappedExperts, files: Sequence[Path]) -> list[list[Extent]]:
    """Return where the matrices of each expert lie: extents of gate, where there is one, up and down.

    files: those of the model, which the `path_index` of an Extent counts. Raises UnsupportedError with the reason where
    they have to be converted while loading.
    """
    if experts.why_not is not None:
        raise UnsupportedError(
            f"{experts.why_not}; pack the model first: ktransformers pack MODEL, with the same --cpu_quant"
        )
    index = {path: number for number, path in enumerate(files)}
    parts = [part for part in (experts.gate, experts.up, experts.down) if part is not None]
    return [[extent_of(matrix, index) for matrix in matrices] for matrices in zip(*parts, strict=True)]


def extent_of(matrix: RawTensor, index: Mapping[Path, int]) -> Extent:
    """Return where a view of a mapped file lies. index: number of each file, which is the extent's `path_index`."""
    place = place_in_file(matrix.data)
    assert place is not None, "views of mapped files"
    return Extent(index[place[0]], place[1], matrix.nbytes)
