"""Recognizes an indexer of blocks of positions (MiniMax-M3) by its own choices on made-up projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import NotRecognized, ProbeInputs, answer, close, probe_module, recognizer

__all__ = ["BlockSpec", "recognize_block_indexer"]

_ROWS, _BLOCK, _CHOSEN = 33, 2, 4
_CHILDREN = frozenset({"q_proj", "k_proj", "q_norm", "k_norm"})


@dataclass(frozen=True, slots=True)
class BlockSpec:
    """Numbers of an indexer of blocks: heads that choose apart, columns of one, positions of a block, and how many
    blocks: in all, and of the last ones.

    score of a block = max over its positions of q . k, both with norm and rotation
    """

    num_heads: int
    head_dim: int
    block: int
    num_chosen: int
    num_local: int


class _Fixed(nn.Module):
    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


@recognizer("an indexer of blocks that kernels compute")
def recognize_block_indexer(module: nn.Module) -> BlockSpec:
    """Return how `module` chooses blocks; None when that is something else."""
    if {name for name, _ in module.named_children()} != _CHILDREN:
        raise NotRecognized("it is made of other parts")
    sized: Any = module
    spec = BlockSpec(
        *(int(getattr(sized, n)) for n in ("num_heads", "head_dim", "block_size", "topk_blocks", "local_blocks"))
    )
    if not 0 <= spec.num_local <= spec.num_chosen:
        raise NotRecognized(f"it chooses {spec.num_chosen} blocks and {spec.num_local} of them always")
    probe_inputs, num_local = ProbeInputs(), min(spec.num_local, _CHOSEN - 1)
    q, k = probe_inputs.normal(1, _ROWS, spec.num_heads * spec.head_dim), probe_inputs.normal(1, _ROWS, spec.head_dim)
    children = {"q_proj": _Fixed(q), "k_proj": _Fixed(k), "q_norm": nn.Identity(), "k_norm": nn.Identity()}
    probe = probe_module(module, modules=children, block_size=_BLOCK, topk_blocks=_CHOSEN, local_blocks=num_local)
    angles = torch.zeros(1, _ROWS, spec.head_dim)  # how it is rotated, its attention shows
    rows = torch.zeros(1, _ROWS, 8)
    chosen = answer(lambda: probe(rows, (angles.cos(), angles.sin()), None, torch.arange(_ROWS)[None]))
    want = answer(lambda: _as_mask(chosen[0].transpose(0, 1)))
    if not close(_as_mask(_choose(q.view(_ROWS, -1, spec.head_dim), k[0], num_local)), want):
        raise NotRecognized("no formula that kernels know gives its choices")
    return spec


def _as_mask(chosen: Tensor) -> Tensor:
    """[T, heads, blocks] of block numbers [T, heads, K], -1 for none."""
    mask = torch.zeros(*chosen.shape[:2], _ROWS // _BLOCK + 2)
    return mask.scatter(-1, torch.where(chosen < 0, mask.shape[-1] - 1, chosen), 1.0)[..., :-1]


def _choose(q: Tensor, k: Tensor, num_local: int) -> Tensor:
    scores = torch.einsum("thd,sd->ths", q, k)
    future = torch.arange(_ROWS)[None, None] > torch.arange(_ROWS)[:, None, None]
    scores = scores.masked_fill(future, float("-inf"))
    spare = -_ROWS % _BLOCK
    padded = torch.nn.functional.pad(scores, (0, spare), value=float("-inf"))
    blocks = padded.view(*scores.shape[:2], -1, _BLOCK).amax(-1)
    back = torch.arange(_ROWS)[:, None, None] // _BLOCK - torch.arange(blocks.shape[-1])
    blocks = blocks.masked_fill((back >= 0) & (back < num_local), float("inf"))
    values, numbers = blocks.topk(_CHOSEN, dim=-1)
    return numbers.masked_fill(values == float("-inf"), -1)
