"""Checks that the tensors of the weight files are those that a plan's modules read: none missing, none left."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ktransformers.errors import TensorMismatchError
from ktransformers.models.facts import ModelFacts

__all__ = ["check_tensors"]

_SHOWN_NAMES = 3  # that a message spells out
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")


def check_tensors(problems: Sequence[str], left: Sequence[str], facts: ModelFacts) -> None:
    """Raise TensorMismatchError where there are `problems`, of tensors that are missing or ill-shaped, or tensors that
    are `left`, read by nobody."""
    parts = []
    if problems:
        parts.append(f"{len(problems)} tensors are missing or of another shape: {_first_few(problems)}")
    if left:
        parts.append(f"{len(left)} tensors are read by no module: {_first_few(left)}")
        end = facts.first_layer + facts.num_layers
        behind = [int(found[1]) >= end for name in left if (found := _LAYER.search(name))]
        if any(behind):
            parts.append(
                f"{sum(behind)} of them are of layers behind layer {end - 1}, where the model's config counts none for "
                "multi-token prediction: its field for their number is missing, null or 0"
            )
    if parts:
        parts.append("the weights and the model's config do not belong together, or a file is missing")
        raise TensorMismatchError("; ".join(parts))


def _first_few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more
