"""Hidden states of a model's last layer, after its norm: what embeddings are made of. Knows modules, not prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktransformers.core import Pooling
from ktransformers.errors import ConfigError, UnsupportedError, reason_of

__all__ = ["HiddenTap", "Pooled", "pooling_of"]

_POOLINGS = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}


class HiddenTap:
    """Over a causal LM of `transformers`, whose operators may be ours. While it is open, steps must not be replayed."""

    def __init__(self, model: Any):
        self._model = model
        self.is_open = False

    @contextmanager
    def watch(self) -> Iterator[list[torch.Tensor]]:
        """The list gets the hidden states of every step that runs meanwhile: fp32 [T, H] on the CPU.

        Raises UnsupportedError for a model without a decoder of its own.
        """
        base = getattr(self._model, "base_model", None)
        if base is None or base is self._model:
            raise UnsupportedError("this model shows no hidden states: it makes no embeddings")
        seen: list[torch.Tensor] = []

        def note(module: Any, inputs: Any, output: Any) -> None:
            seen.append(output.last_hidden_state[0].detach().to("cpu", torch.float32))

        hook = base.register_forward_hook(note)
        self.is_open = True
        try:
            yield seen
        finally:
            self.is_open = False
            hook.remove()


class Pooled:
    """One vector of a sequence, from the hidden states of its tokens in their order: `add` them, then ask."""

    def __init__(self, pooling: Pooling):
        self._pooling, self._len = pooling, 0
        self._sum: np.ndarray[Any, np.dtype[np.float64]] | float = 0.0

    def add(self, hidden_states: torch.Tensor) -> None:
        """fp32 [T, H] of the next T tokens."""
        rows = hidden_states.numpy()
        if self._pooling is Pooling.MEAN:
            self._sum = self._sum + rows.sum(0, dtype=np.float64)
            self._len += len(rows)
        elif len(rows):
            self._sum, self._len = rows[-1].astype(np.float64), 1

    def vector(self) -> bytes:
        """fp32 [H], little-endian."""
        return np.asarray(self._sum / self._len, dtype="<f4").tobytes()


def pooling_of(*paths: Path | None) -> Pooling | None:
    """How a model wants to be pooled: 1_Pooling/config.json in its folder (sentence-transformers' form) says so.

    Decoders that say nothing are pooled by their last token. None: in a way that is neither. Raises ConfigError.
    """
    for path in paths:
        file = None if path is None else path / "1_Pooling" / "config.json"
        if file is None or not file.is_file():
            continue
        try:
            modes = {name for name, is_on in json.loads(file.read_text()).items() if is_on is True}
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{file} cannot be read: {reason_of(error)}") from error
        chosen = {name for name in modes if name.startswith("pooling_mode_")}
        return _POOLINGS.get(chosen.pop()) if len(chosen) == 1 else None
    return Pooling.LAST
