"""Looks through a model's files for the tensor that makes its logits no numbers, once that has happened.

On a thread of its own, in pieces: answers that are still good go on. The first error waits a moment, so that of a small
model it names the tensor; of a large one the log does, when all has been read.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ktransformers.config import EngineConfig
from ktransformers.errors import KTransformersError
from ktransformers.kernels.types import RawTensor
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.loader import weight_format
from ktransformers.weights.quantize.transcode import dequantize
from ktransformers.weights.safetensors.file import open_safetensors

__all__ = ["DamageScan", "find_damage"]

logger = logging.getLogger(__name__)

PATIENCE = 1.0
"""Seconds that the first error waits for the scan."""

_CHUNK = 1 << 22  # weights
_MOST_NAMED = 3
_ODD = 1e5
"""Weights are near 1: a larger one comes of a flipped bit in an exponent, and infinity of that."""

_FLOATS = ("F32", "F16", "BF16", "F8_E4M3")


@dataclass(frozen=True, slots=True)
class _Found:
    """A tensor with numbers that are none, or with the largest one. count: how many are not finite."""

    path: Path
    name: str
    count: int
    largest: float


class DamageScan:
    """A scan for damage, made at most once, of the files that a config names. Any thread may ask."""

    def __init__(self, config: EngineConfig):
        self._config = config
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._said = ""

    def said(self) -> str:
        """The text to put behind an error about logits: empty, or what was found. The first call begins the scan."""
        with self._lock:
            is_first = self._thread is None
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kt-damage", daemon=True)
                self._thread.start()
        if is_first:
            self._thread.join(PATIENCE)
        if self._thread.is_alive():
            return "; its files are being read, and the log will name the tensor"
        return self._said

    def _run(self) -> None:
        try:
            found = find_damage(self._config)
        except KTransformersError as error:
            found = f"its files cannot be read any more: {error}"
        if found:
            self._said = f"; {found}"
            logger.error("the model computes what are no numbers: %s", found)


def find_damage(config: EngineConfig) -> str:
    """Describe what is wrong with the weights in a model's files, in words; empty for a model without files.

    Reads all of them. Raises KTransformersError.
    """
    if config.gguf_path is None and config.model_path is None:
        return ""
    bad, most = list[_Found](), None
    for one in _scanned(config):
        if one.count:
            bad.append(one)
        elif most is None or one.largest > most.largest:
            most = one
    if bad:
        named = ", ".join(f"{one.name!r} of {one.path.name} ({one.count})" for one in bad[:_MOST_NAMED])
        more = f" and {len(bad) - _MOST_NAMED} tensors more" if len(bad) > _MOST_NAMED else ""
        return f"the files hold numbers that are not finite in {named}{more}: download or convert them again"
    if most is not None and most.largest > _ODD:
        return (
            f"no tensor of the files holds NaN or infinity, but {most.name!r} of {most.path.name} holds a weight of "
            f"{most.largest:.3g}: download or convert it again"
        )
    return "no tensor of the files holds NaN or infinity: its config does not fit them"


def _scanned(config: EngineConfig) -> Iterator[_Found]:
    path = config.gguf_path or config.model_path
    assert path is not None
    if weight_format(path, None if config.gguf_path is not None else "safetensors") == "gguf":
        for file in open_gguf(path).files:
            for name in file.tensors:
                yield _judged(file.path, name, _gguf_pieces(file.raw(name), name))
        return
    for part in open_safetensors(path).files:
        for name, tensor in part.tensors.items():
            if tensor.dtype in _FLOATS:
                yield _judged(part.path, name, _pieces(part.torch_tensor(name).reshape(-1)))


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    for start in range(0, len(flat), _CHUNK):
        yield flat[start : start + _CHUNK]


def _gguf_pieces(raw: RawTensor, name: str) -> Iterator[torch.Tensor]:
    step = max(_CHUNK // max(raw.cols, 1), 1)
    rows = raw.data.reshape(raw.rows, -1)
    for start in range(0, raw.rows, step):
        piece = rows[start : start + step]
        yield dequantize(RawTensor(piece.reshape(-1), raw.qtype, (len(piece), raw.cols)), name)


def _judged(path: Path, name: str, pieces: Iterator[torch.Tensor]) -> _Found:
    count, largest = 0, 0.0
    for piece in pieces:
        values = piece.float()
        is_good = values.isfinite()
        count += int((~is_good).sum())
        if values.numel():
            largest = max(largest, float(torch.where(is_good, values, 0.0).abs().max()))
    return _Found(path, name, count, largest)
