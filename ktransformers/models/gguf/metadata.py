"""Checked access to a GGUF file's metadata, and which keys were asked for. Knows no model family."""

from __future__ import annotations

import builtins
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from ktransformers.errors import FormatError, UnsupportedError

__all__ = ["Metadata", "Values", "repeated"]

MAX_COUNT = 1 << 31
Values = dict[str, object]


def repeated(value: object) -> object:
    """Return what an array says of every layer, if that is the same; all else as it is."""
    if isinstance(value, np.ndarray) and value.size and (value == value.flat[0]).all():
        return value.flat[0].item()
    return value


class Metadata:
    """Checked access to one file's metadata (keys of the architecture without its prefix) and tensor shapes.

    factors: the values of the tensors that belong to the rotary embedding, by their names.
    """

    def __init__(
        self,
        metadata: Mapping[str, object],
        shapes: Mapping[str, tuple[int, ...]],
        factors: Mapping[str, Sequence[float]] | None = None,
    ):
        arch = metadata.get("general.architecture")
        if not isinstance(arch, str):
            raise FormatError("the GGUF file does not say its general.architecture; it holds no language model")
        self.arch = arch
        self.metadata = metadata
        self.shapes = shapes
        self.factors = factors or {}
        self._read: set[str] = set()

    def raw(self, key: str) -> object:
        """Return the value of a key, unchecked; None when the file has none."""
        self._read.add(key)
        return self.metadata.get(f"{self.arch}.{key}")

    def unread(self) -> dict[str, object]:
        """Return the keys of the architecture, without its prefix, that were not asked for so far, with their
        values.
        """
        prefix = f"{self.arch}."
        said = {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}
        return {key: value for key, value in said.items() if key not in self._read}

    @property
    def layers(self) -> int:
        """Number of layers of the model itself, without those of multi-token prediction at its end.

        A file may say that the model has such layers and hold none: llama.cpp's converter counts them as blocks all the
        same (GLM-4.5, of a checkpoint that left them out), or does not (DeepSeek-V4).
        """
        blocks, predicting = self.int("block_count"), self.find_int("nextn_predict_layers") or 0
        own = blocks - predicting
        is_there = any(name.startswith(f"blk.{own}.nextn.") for name in self.shapes)
        is_counted = is_there or not any(name.startswith(f"blk.{own}.") for name in self.shapes)
        return own if is_counted else blocks

    def has(self, tensor: str) -> bool:
        """Whether any layer, or the model itself, has the tensor: `tensor` is a regex of what follows "blk.N."."""
        pattern = re.compile(rf"(blk\.\d+\.)?(?:{tensor})")
        return any(pattern.fullmatch(name) for name in self.shapes)

    def shape(self, tensor: str) -> tuple[int, ...] | None:
        """Return the shape of the first layer's tensor of that name."""
        pattern = re.compile(rf"blk\.\d+\.{re.escape(tensor)}")
        return next((shape for name, shape in self.shapes.items() if pattern.fullmatch(name)), None)

    def by_tensor(self, tensor: str) -> builtins.list[builtins.bool]:
        """Return, by layer, whether it has the tensor of that name."""
        return [f"blk.{layer}.{tensor}" in self.shapes for layer in range(self.layers)]

    def find_int(self, key: str, least: int = 0) -> int | None:
        """Return a count, or None when the file does not say. A list with one entry per layer must hold one
        value only.
        """
        value = repeated(self.raw(key))
        if value is None:
            return None
        if isinstance(value, np.ndarray):
            raise UnsupportedError(f"{self.arch}.{key} differs from layer to layer; pass --model_path with the config")
        if type(value) is not int or not least <= value <= MAX_COUNT:
            raise FormatError(f"{self.arch}.{key} is {value!r:.40}; a count of at least {least} is needed")
        return value

    def list(self, key: str) -> list[builtins.int]:
        """Return the counts of an array, or nothing when the file does not say."""
        value = self.raw(key)
        if value is None:
            return []
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
            raise FormatError(f"{self.arch}.{key} is {value!r:.40}; an array of counts is needed")
        return [one for one in value.tolist() if isinstance(one, builtins.int)]

    def find_some(self, key: str) -> builtins.int | None:
        """Return a count, which an array may say of some layers only: 0 stands for those that have none."""
        value = self.raw(key)
        if not isinstance(value, np.ndarray):
            return self.find_int(key, 1)
        some = {one for one in self.list(key) if one}
        if len(some) > 1 or not all(0 < one <= MAX_COUNT for one in some):
            raise UnsupportedError(f"{self.arch}.{key} differs from layer to layer; pass --model_path with the config")
        return some.pop() if some else None

    def by_layer(self, key: str) -> builtins.list[builtins.bool | builtins.int] | None:
        """Return an array of counts or flags with one for each layer; None when the file has no array there."""
        value = self.raw(key)
        if not isinstance(value, np.ndarray | list):
            return None
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iub" or len(array) < self.layers:
            raise FormatError(
                f"{self.arch}.{key} is {value!r:.40}; {self.layers} counts are needed, one for each layer"
            )
        return array[: self.layers].tolist()  # type: ignore[no-any-return]

    def floats(self, key: str) -> builtins.list[builtins.float] | None:
        """Return a finite number for each layer: one for all, or a list. None when the file does not say."""
        value = self.raw(key)
        if not isinstance(value, np.ndarray | list):
            one = self.find_float(key)
            return None if one is None else [one] * self.layers
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or len(array) < self.layers or not np.isfinite(array).all():
            raise FormatError(
                f"{self.arch}.{key} is {value!r:.40}; {self.layers} numbers are needed, one for each layer"
            )
        return [float(f"{number:.7g}") for number in array[: self.layers].tolist()]

    def ints(self, key: str, least: int = 1) -> tuple[int, ...]:
        """Return a count for each layer, which the file must have: one for all, or a list."""
        counts = self.by_layer(key)
        if counts is None:
            return (self.int(key, least),) * self.layers
        if not all(type(one) is int and least <= one <= MAX_COUNT for one in counts):
            raise FormatError(f"{self.arch}.{key} is {counts!r:.40}; counts of at least {least} are needed")
        return tuple(counts)

    @property
    def head_size(self) -> int:
        """Return the elements of a head, where the file has no key for it."""
        size = self.int("embedding_length") // self.int("attention.head_count")
        if size == 0:
            raise FormatError(f"{self.arch}.attention.head_count is more than {self.arch}.embedding_length")
        return size

    def int(self, key: str, least: int = 1) -> int:
        """Return a count that the file must have."""
        value = self.find_int(key, least)
        if value is None:
            raise FormatError(f"the GGUF file lacks {self.arch}.{key}; pass --model_path with the model's config.json")
        return value

    def find_float(self, key: str) -> float | None:
        """Return a finite number, or None when the file does not say."""
        value = self.raw(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not math.isfinite(value):  # type: ignore[arg-type]
            raise FormatError(f"{self.arch}.{key} is {value!r:.40}; a finite number is needed")
        # The file holds fp32; what was 1e-06 in config.json is the double 9.99999997e-07 here. Seven digits undo that.
        return float(f"{value:.7g}")

    def float(self, key: str, default: float | None = None) -> float:
        """Return a finite number that the file must have, unless there is a default."""
        value = self.find_float(key)
        value = default if value is None else value
        if value is None:
            raise FormatError(f"the GGUF file lacks {self.arch}.{key}; pass --model_path with the model's config.json")
        return value

    def bool(self, key: str, default: bool) -> bool:
        """Return a flag that the file must have, unless there is a default."""
        value = self.raw(key)
        if value is None:
            return default
        if type(value) is not bool:
            raise FormatError(f"{self.arch}.{key} is {value!r:.40}; a boolean is needed")
        return value
