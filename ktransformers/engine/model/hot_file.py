"""What was learned of the experts of a model: how often each was picked, in a file that is named after the model.

It lies in the user's cache folder. The next start fills its slots by it, and planning divides a GPU's room by it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ktransformers.engine.model.fingerprint import ModelDigests
from ktransformers.system.user_files import replace_own
from ktransformers.system.user_folders import user_cache_dir

__all__ = ["HotFile"]

Floats = npt.NDArray[np.float64]

logger = logging.getLogger(__name__)

_FOLDER = "hot-experts"
_FORMAT = 1
_DIGITS = 3
_MOST_SCORE = 1e9  # picks count half after some thousand steps: no sum of them comes near


class HotFile:
    """The file of what was learned of one model's experts: {number of a layer: scores [E]}."""

    def __init__(self, model: ModelDigests, folder: Path | None = None) -> None:
        self._model = f"{model.config} {model.tensors} {model.data}"
        name = hashlib.sha256(self._model.encode()).hexdigest()[:20]
        self.path = (folder or user_cache_dir()) / _FOLDER / f"{name}.json"

    @staticmethod
    def has_any() -> bool:
        """Whether there is such a file of any model: without, nobody has to know which model this is."""
        try:
            return any((user_cache_dir() / _FOLDER).glob("*.json"))
        except OSError:  # a home of another user, say: no file that can be read is there
            return False

    def read(self) -> dict[int, Floats]:
        """Return what the file holds; nothing, with one line in the log, for one that is of something else or
        damaged."""
        try:
            held = json.loads(self.path.read_text())
            if (held["format"], held["model"]) != (_FORMAT, self._model):
                logger.warning("%s is of another model or version: which experts are hot is learned anew", self.path)
                return {}
            scores = {int(layer): np.array(scores, np.float64) for layer, scores in held["scores"].items()}
            if any(each.ndim != 1 or not ((each >= 0.0) & (each <= _MOST_SCORE)).all() for each in scores.values()):
                raise ValueError(f"scores must be numbers from 0 to {_MOST_SCORE:g}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError, RecursionError) as error:
            logger.warning("%s cannot be used (%r): which experts are hot is learned anew", self.path, error)
            return {}
        return scores

    def add(self, scores: Mapping[int, Floats]) -> None:
        """Keep `scores` in the file, in the place of those of the same layers; where that cannot be, one line says
        so."""
        merged = {layer: each.round(_DIGITS).tolist() for layer, each in {**self.read(), **scores}.items()}
        try:
            held = {"format": _FORMAT, "model": self._model, "scores": merged}
            replace_own(self.path, json.dumps(held).encode())
        except OSError as error:
            logger.info("%s cannot be written (%s): which experts are hot is learned at every start", self.path, error)
