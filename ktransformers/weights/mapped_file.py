"""A file mapped read-only as one flat byte tensor. Knows no format."""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from pathlib import Path

import torch

from ktransformers.errors import FormatError
from ktransformers.kernels.cpu.pages import note_mapping
from ktransformers.system.file_kinds import check_is_file, wrong_start

__all__ = ["map_file", "place_in_file", "typed_view"]

_paths: dict[int, Path] = {}
"""Every file that is mapped, by the address of its map."""


def map_file(path: Path) -> torch.Tensor:
    """Map `path` as a uint8 tensor [size] over a shared read-only mapping, which lives as long as its views.

    Writing to it is a segmentation fault, so no caller may. Raises FormatError for an empty or unreadable file.
    """
    check_is_file(path)
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise FormatError(f"{path} {wrong_start(b'')}")
            mapping = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                # torch has no read-only tensors and warns of this one. A private writable mapping would silence it, but
                # the kernel counts such a mapping against memory and refuses files larger than RAM.
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                data = torch.frombuffer(mapping, dtype=torch.uint8)
            note_mapping(data, mapping, file.fileno())
            _note_path(data, mapping, path)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {error.strerror or error}") from error
    return data


def _note_path(data: torch.Tensor, owner: object, path: Path) -> None:
    start = data.data_ptr()
    _paths[start] = path
    weakref.finalize(owner, _paths.pop, start, None)


def place_in_file(data: torch.Tensor) -> tuple[Path, int] | None:
    """Return the file that a view is of, and its offset there in bytes; None for a tensor that is in no mapped file."""
    path = _paths.get(data.untyped_storage().data_ptr())
    return None if path is None else (path, int(data.storage_offset()) * data.element_size())


def typed_view(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return uint8 bytes [n] as elements of `dtype` [n / itemsize]: a view where the address allows it, else a copy."""
    if data.storage_offset() % dtype.itemsize:
        data = data.clone()
    return data.view(dtype)
