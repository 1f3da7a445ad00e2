"""Which MoE blocks scale what their experts see, rather than what they give."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import Draws, Unlike, answer, close, recognizer, twin_of

__all__ = ["scales_inputs"]

_ROWS, _COLS = 5, 8


class _Scores(nn.Module):
    """A router that gives made-up logits; as Llama 4's, the logistic function of those that are chosen, else 0."""

    def __init__(self, logits: Tensor, top_k: int):
        super().__init__()
        self.logits, self.top_k = logits, top_k

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        best, ids = self.logits.topk(self.top_k, dim=-1)
        scores = torch.full_like(self.logits, float("-inf")).scatter_(1, ids, best)
        return scores.sigmoid(), self.logits


class _Experts(nn.Module):
    """Rows of every expert one after another, [E T, H]; expert e computes sin((e + 1) x)."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, rows: Tensor) -> Tensor:
        factors = torch.arange(1, self.count + 1).view(-1, 1, 1)
        return torch.sin(factors * rows.view(self.count, -1, rows.shape[-1])).view(rows.shape)


class _Shared(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return torch.cos(rows)


@recognizer("a block whose experts see rows times their weights")
def scales_inputs(module: nn.Module) -> bool:
    """True for a block that computes shared(x) + sum of expert(x sigmoid(logit)) over the top_k; None for others."""
    parts = {name for name, child in module.named_children() if child is not None}
    if parts != {"router", "experts", "shared_expert"}:
        raise Unlike(f"it is made of {', '.join(sorted(parts))}")
    top_k, count = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    if not isinstance(top_k, int) or not isinstance(count, int) or not 0 < top_k <= count:
        raise Unlike("it does not say how many experts a row has")
    draws = Draws()
    rows, logits = draws.normal(_ROWS, _COLS), draws.normal(_ROWS, count)
    children: dict[str, nn.Module] = {"router": _Scores(logits, top_k), "experts": _Experts(count)}
    children["shared_expert"] = _Shared()
    got = answer(lambda: twin_of(module, modules=children, hidden_dim=_COLS)(rows)[0])
    best, ids = logits.topk(top_k, dim=-1)
    want = torch.cos(rows)
    for rank in range(top_k):
        want = want + torch.sin((ids[:, rank, None] + 1) * rows * best[:, rank, None].sigmoid())
    if not close(got, want):
        raise Unlike("it weighs its experts in its own way")
    return True
