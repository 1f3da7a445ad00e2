"""Quantizing in a test: no bar, and what a file holds by the `gguf` package's own reader."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import gguf
import numpy as np

from ktransformers.convert.quantize_model import QuantizeResult, Task, quantize_model
from ktransformers.kernels.types import QuantType

__all__ = ["NoBar", "contents", "quantized", "tensors"]


class NoBar:
    """Shows nothing; calls `each` with the bytes of every piece."""

    def __init__(self, each: Callable[[int], None] = lambda nbytes: None):
        self.advance = each

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


def quantized(
    model: Path, out: Path, mixture: str = "f32", each: Callable[[int], None] = lambda nbytes: None, **more: Any
) -> QuantizeResult:
    """Write `out`."""
    return quantize_model(Task(model, out, mixture, **more), lambda total, here: NoBar(each))


def contents(path: Path) -> dict[str, Any]:
    """Every key of the metadata with its types and value."""
    reader = gguf.GGUFReader(path)
    return {
        key: ([kind.name for kind in field.types], field.contents())
        for key, field in reader.fields.items()
        if not key.startswith("GGUF.")
    }


def tensors(path: Path) -> dict[str, tuple[QuantType, tuple[int, ...], np.ndarray]]:
    """By name the type, the shape in torch order and the bytes."""
    return {
        tensor.name: (
            QuantType(tensor.tensor_type),
            tuple(int(n) for n in reversed(tensor.shape)),
            np.array(tensor.data).view(np.uint8).reshape(-1),
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
