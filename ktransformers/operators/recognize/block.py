"""Recognizes MoE blocks that weigh what their experts give, as most do, and those that scale what experts see."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import (
    Constant,
    NotRecognized,
    ProbeInputs,
    StandIn,
    answer,
    close,
    made_of,
    probe_module,
    recognizer,
)

__all__ = ["scales_inputs", "weighs_outputs"]

_ROWS, _COLS = 5, 8
_EXPERTS, _TOP_K = 6, 2
_SIZES = ("hidden_dim", "hidden_size")
_SHARED = ("shared_experts", "shared_mlp", "shared_expert")
_SCORE = "shared_expert_gate"


def _scores(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """What Llama 4's router gives: the logistic function of the logits that are chosen, else 0; and the logits."""
    best, ids = logits.topk(top_k, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter_(1, ids, best).sigmoid(), logits


def _experts(rows: Tensor, count: int) -> Tensor:
    """Rows of every expert one after another, [E T, H]; expert e computes sin((e + 1) x)."""
    factors = torch.arange(1, count + 1).view(-1, 1, 1)
    return torch.sin(factors * rows.view(count, -1, rows.shape[-1])).view(rows.shape)


@recognizer("a block whose experts see rows times their weights")
def scales_inputs(module: nn.Module) -> bool:
    """Whether a block computes shared(x) + sum of expert(x sigmoid(logit)) over the top_k: True, or None for others."""
    parts = made_of(module)
    if parts != {"router", "experts", "shared_expert"}:
        raise NotRecognized(f"it is made of {', '.join(sorted(parts))}")
    top_k, count = getattr(module, "top_k", None), getattr(module, "num_experts", None)
    if not isinstance(top_k, int) or not isinstance(count, int) or not 0 < top_k <= count:
        raise NotRecognized("it does not say how many experts a row has")
    probe_inputs = ProbeInputs()
    rows, logits = probe_inputs.normal(_ROWS, _COLS), probe_inputs.normal(_ROWS, count)
    children = {
        "router": Constant(*_scores(logits, top_k)),
        "experts": StandIn(partial(_experts, count=count)),
        "shared_expert": StandIn(torch.cos),
    }
    got = answer(lambda: probe_module(module, modules=children, hidden_dim=_COLS)(rows)[0])
    best, ids = logits.topk(top_k, dim=-1)
    want = torch.cos(rows)
    for rank in range(top_k):
        want = want + torch.sin((ids[:, rank, None] + 1) * rows * best[:, rank, None].sigmoid())
    if not close(got, want):
        raise NotRecognized("it weighs its experts in its own way")
    return True


def _weighed(rows: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Expert e computes sin((e + 1) x); rows [..., H], their experts and weights [T, K]."""
    results = torch.sin((ids[..., None] + 1) * rows.reshape(-1, 1, rows.shape[-1]))
    return (results * weights[..., None]).sum(1).view(rows.shape)


def _score(rows: Tensor) -> Tensor:
    """Of a row, [..., 1]."""
    return rows.sum(-1, keepdim=True)


@recognizer("a block whose router weighs what its experts give")
def weighs_outputs(module: nn.Module) -> bool:
    """Whether a block computes experts(x, *gate(x)), and adds shared(x) or shared(x) sigmoid(score(x)): True, or None
    for others.

    None for others: whose gate does not choose by itself, whose sum is scaled, that return more than that sum.
    """
    parts = made_of(module)
    shared = sorted(parts & set(_SHARED))
    has_score = shared == ["shared_expert"]
    if len(shared) > 1 or parts != {"gate", "experts", *shared, *([_SCORE] if has_score else [])}:
        raise NotRecognized(f"it is made of {', '.join(sorted(parts))}")
    if any(True for _ in module.parameters(recurse=False)) or any(True for _ in module.buffers(recurse=False)):
        raise NotRecognized("it holds more than its parts")
    probe_inputs = ProbeInputs()
    rows, logits = probe_inputs.normal(_ROWS, _COLS), probe_inputs.normal(_ROWS, _EXPERTS)
    weights, ids = probe_inputs.positive(_ROWS, _TOP_K), logits.topk(_TOP_K, dim=-1)[1]
    children = {"gate": Constant(logits, weights, ids), "experts": StandIn(_weighed)}
    children |= {name: StandIn(torch.cos) for name in shared} | ({_SCORE: StandIn(_score)} if has_score else {})
    sizes: dict[str, Any] = {name: _COLS for name in _SIZES if hasattr(module, name)}
    got = answer(lambda: probe_module(module, modules=children, training=False, **sizes)(rows[None]))
    want = _weighed(rows, ids, weights)
    if shared:
        want = want + torch.cos(rows) * (_score(rows).sigmoid() if has_score else 1.0)
    if not close(got, want[None]):
        raise NotRecognized("it adds up in its own way")
    return True
