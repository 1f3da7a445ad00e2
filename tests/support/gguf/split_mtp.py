"""Divides a GGUF with layers for multi-token prediction into two files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

__all__ = ["split_mtp"]

_SHARED = ("token_embd.weight", "output_norm.weight", "output.weight")


def split_mtp(whole: Path, folder: Path, name: str = "mtp-tiny-Q8_0.gguf") -> Path:
    """Write what `--no-mtp` and `--mtp` of the converter give of the model in `whole`. Returns the file of the first;
    that of the second is beside it and called `name`."""
    reader = gguf.GGUFReader(whole)
    arch = reader.fields["general.architecture"].contents()
    blocks, nextn = (reader.fields[f"{arch}.{key}"].contents() for key in ("block_count", "nextn_predict_layers"))
    count = blocks - nextn
    mixer = f"blk.{count}.nextn.hc_head_"

    def of_layers(tensor: str) -> str | None:
        if tensor.startswith(mixer):
            return f"output_hc_{tensor.removeprefix(mixer)}"
        is_behind = tensor.startswith("blk.") and int(tensor.split(".")[1]) >= count
        return tensor if is_behind or tensor in _SHARED else None

    def of_model(tensor: str) -> str | None:
        return None if tensor.startswith("blk.") and int(tensor.split(".")[1]) >= count else tensor

    _write(reader, folder / name, {}, of_layers)
    by_layer: dict[str, Any] = {
        field.name: field.contents()[:count]
        for field in reader.fields.values()
        if field.name.startswith(arch) and isinstance(field.contents(), list) and len(field.contents()) == blocks
    }
    changed = {f"{arch}.block_count": count, f"{arch}.nextn_predict_layers": None, **by_layer}
    return _write(reader, folder / "tiny-Q8_0.gguf", changed, of_model)


def _write(reader: gguf.GGUFReader, path: Path, changed: dict[str, Any], named: Callable[[str], str | None]) -> Path:
    """changed: values of metadata that differ; None: left out. named: what a tensor is called there; None: left out."""
    writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
    for field in reader.fields.values():
        value = changed.get(field.name, field.contents())
        if field.name.startswith("GGUF.") or field.name == "general.architecture" or value is None:
            continue
        writer.add_key_value(field.name, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if (name := named(tensor.name)) is not None:
            writer.add_tensor(name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
