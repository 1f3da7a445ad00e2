"""Recognizes an indexer of sparse latent attention by its own choices on made-up projections."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    answer,
    matching,
    probe_module,
    recognizer,
)

__all__ = ["IndexSpec", "choose", "recognize_indexer"]

_ROWS = 24
_CHOSEN = 3
_CHILDREN = frozenset({"wq_b", "wk", "k_norm", "weights_proj"})


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Numbers of a lightning indexer (DeepSeek-V3.2): heads, columns of a head and how many of them are rotated.

    is_last: those are the last ones, else the first.

    score of a position = sum_h weights[h] * head_scale * max(scale * q[h] . k, 0)
    """

    num_heads: int
    head_dim: int
    rotary_dim: int
    is_interleaved: bool
    num_chosen: int
    scale: float
    head_scale: float
    is_last: bool = False

    def rotated_first(self, x: Tensor) -> Tensor:
        """Return [..., D] with the columns in front that are rotated. Products of queries and keys stay what
        they are.
        """
        return x.roll(self.rotary_dim, dims=-1) if self.is_last else x


class _Fixed(nn.Module):
    def __init__(self, value: Tensor):
        super().__init__()
        self.value, self.weight = value, value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


class _Handed(nn.Module):
    """A norm that changes nothing, of whose weight only the type is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.ones(1)

    def forward(self, x: Tensor) -> Tensor:
        return x


@recognizer("an indexer that kernels compute")
def recognize_indexer(module: nn.Module) -> IndexSpec:
    """Return how `module` scores positions; None when that is something else."""
    if {name for name, _ in module.named_children()} != _CHILDREN:
        raise NotRecognized("it is made of other parts")
    sized: Any = module
    heads, dim, rotary = (int(getattr(sized, name)) for name in ("n_heads", "head_dim", "qk_rope_head_dim"))
    if not 0 < rotary <= dim or rotary % 2:
        raise NotRecognized(f"it rotates {rotary} of {dim} columns")
    probe_inputs = ProbeInputs()
    q, k, weights = (
        probe_inputs.normal(1, _ROWS, heads * dim),
        probe_inputs.normal(1, _ROWS, dim),
        probe_inputs.normal(1, _ROWS, heads),
    )
    angles = probe_inputs.normal(_ROWS, rotary // 2)
    children = {"wq_b": _Fixed(q), "wk": _Fixed(k), "k_norm": _Handed(), "weights_proj": _Fixed(weights)}
    probe = probe_module(module, modules=children, index_topk=_CHOSEN)
    mask = torch.full((1, _ROWS, _ROWS), float("-inf")).triu(1)
    twice = torch.cat((angles, angles), dim=-1)[None]
    rows = torch.zeros(1, _ROWS, 8)
    chosen = answer(lambda: probe(rows, rows, (twice.cos(), twice.sin()), mask, torch.arange(_ROWS)[None]))
    sizes = (heads, dim, rotary)
    specs = [
        IndexSpec(*sizes, is_interleaved, int(sized.index_topk), float(sized.softmax_scale), heads**-0.5, is_last)
        for is_interleaved, is_last in product((False, True), repeat=2)
    ]
    parts = q.view(_ROWS, heads, dim), k.view(_ROWS, 1, dim), weights[0]
    want = answer(lambda: _seen(chosen[0, _CHOSEN - 1 :]))
    return matching(want, specs, lambda spec: _seen(choose(*parts, angles, spec)[_CHOSEN - 1 :]))


def _seen(chosen: Tensor) -> Tensor:
    return chosen.sort(dim=-1).values.float()


def choose(q: Tensor, k: Tensor, weights: Tensor, angles: Tensor, spec: IndexSpec) -> Tensor:
    """Choose positions [T, _CHOSEN] for rows 0 .. T - 1 of one sequence, in plain torch."""
    q, k = (_turned(spec.rotated_first(x), angles, spec) for x in (q, k))
    scores = (torch.einsum("thd,sd->ths", q, k[:, 0]) * spec.scale).relu()
    total = torch.einsum("th,ths->ts", weights * spec.head_scale, scores)
    return total.masked_fill(torch.ones_like(total).triu(1).bool(), float("-inf")).topk(_CHOSEN, dim=-1).indices


def _turned(x: Tensor, angles: Tensor, spec: IndexSpec) -> Tensor:
    half = spec.rotary_dim // 2
    cos, sin, turned = angles.cos()[:, None], angles.sin()[:, None], x[..., : spec.rotary_dim]
    a, b = (turned[..., ::2], turned[..., 1::2]) if spec.is_interleaved else (turned[..., :half], turned[..., half:])
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., spec.rotary_dim :]), dim=-1)
