"""Forms in which llama.cpp's converter stores the small parameters and the heads of recurrent layers. Knows names and
orders only.

A value head of Gated DeltaNet shares its key head with its neighbours in the module, and with every K-th head in files
of Qwen3.5, so that ggml can repeat key heads as a whole:

    module    k0 v0, k0 v1, k1 v2, k1 v3      value head h uses key head h // share
    file      k0 v0, k1 v2, k0 v1, k1 v3      value head p uses key head p % key_heads
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache

from ktransformers.models.facts import DeltaFacts

__all__ = ["Form", "ba_rows", "form_of", "tiled_heads", "tiled_rows", "value_columns"]


class Form(Enum):
    """The shape that a parameter has in its module, from what the file holds of it."""

    AS_STORED = auto()
    CONVOLUTION = auto()  # [channels, width], dimensions of size 1 anywhere -> [channels, 1, width]
    FLAT = auto()  # [heads, 1] or [groups, size] -> one dimension
    BY_HEAD = auto()  # [heads] with dimensions of size 1 -> [1, 1, heads, 1]

    def shape(self, stored: Sequence[int]) -> tuple[int, ...]:
        """Return the module's shape, for a tensor of the shape `stored`."""
        total = math.prod(stored)
        if self is Form.CONVOLUTION:
            return (total // stored[-1], 1, stored[-1])
        if self is Form.FLAT:
            return (total,)
        return (1, 1, total, 1) if self is Form.BY_HEAD else tuple(stored)


_CONVOLUTION = re.compile(r"\.(?:conv1d|conv\.conv|[qkv]_conv1d)\.weight$")
_FLAT = re.compile(r"\.(?:mamba|mixer)\.(?:A_log|D|norm\.weight)$")
_MATRIX_A_LOG = frozenset({"jamba", "mamba"})  # Mamba's own, [channels, state]


def form_of(name: str, arch: str) -> Form:
    """Return the form of the parameter `name` in files of `arch`."""
    if _CONVOLUTION.search(name):
        return Form.CONVOLUTION
    if name.endswith(".forget_gate.A_log"):
        return Form.BY_HEAD if arch == "kimi-linear" else Form.FLAT
    return Form.FLAT if _FLAT.search(name) and arch not in _MATRIX_A_LOG else Form.AS_STORED


@lru_cache
def tiled_heads(delta: DeltaFacts) -> tuple[int, ...]:
    """Return where the file holds each of the module's value heads."""
    share = delta.value_heads // delta.key_heads
    return tuple(head % share * delta.key_heads + head // share for head in range(delta.value_heads))


@lru_cache
def _spread(heads: tuple[int, ...], size: int, first: int) -> tuple[int, ...]:
    """Rows 0 .. first - 1 as they are, then `size` rows of each head."""
    return (*range(first), *(first + head * size + i for head in heads for i in range(size)))


_ROWS = re.compile(
    r"\.linear_attn\.(in_proj_qkv\.weight|in_proj_z\.weight|in_proj_[ab]\.weight|A_log|dt_bias|conv1d\.weight)$"
)


def tiled_rows(name: str, delta: DeltaFacts) -> tuple[int, ...] | None:
    """Return the file's row for each row of the module's parameter `name`; None where they are in order."""
    found = _ROWS.search(name)
    if found is None or delta.key_heads == delta.value_heads:
        return None
    kind = found[1].partition(".")[0]
    size = delta.value_dim if kind in ("in_proj_qkv", "in_proj_z", "conv1d") else 1
    first = 2 * delta.key_heads * delta.key_dim if kind in ("in_proj_qkv", "conv1d") else 0
    return _spread(tiled_heads(delta), size, first)


def value_columns(name: str, delta: DeltaFacts) -> tuple[int, ...] | None:
    """Return the file's run of value_dim columns for each of the module's, in `name`; None where they are in order."""
    if not name.endswith(".linear_attn.out_proj.weight") or delta.key_heads == delta.value_heads:
        return None
    return tiled_heads(delta)


@lru_cache
def ba_rows(delta: DeltaFacts, part: str) -> tuple[int, ...]:
    """Return the rows of Qwen3-Next's joined projection that are the module's `b` or `a`: both are side by side by key
    head.
    """
    share = delta.value_heads // delta.key_heads
    first = 0 if part == "b" else share
    return tuple(key * 2 * share + first + i for key in range(delta.key_heads) for i in range(share))
