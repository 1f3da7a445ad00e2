"""Keys and values of a GGUF as Python has them."""

from __future__ import annotations

from collections.abc import Mapping

import gguf


def add_keys(writer: gguf.GGUFWriter, values: Mapping[str, object]) -> None:
    """Numbers as uint32 and float32, lists as arrays, all else as a string."""
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list | tuple):
            writer.add_array(key, value)
        else:
            writer.add_string(key, str(value))
