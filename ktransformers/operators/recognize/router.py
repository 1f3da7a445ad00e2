"""Recognizes routers that one kernel can stand in for: how they score, choose and weigh experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from ktransformers.kernels.cpu.router import RouterSpec, Scoring
from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    answer,
    close,
    matching,
    probe_module,
    recognizer,
)

__all__ = ["CHOICE_BIAS", "ROUTER_CHILD", "recognize_router", "route"]

CHOICE_BIAS = "e_score_correction_bias"
ROUTER_CHILD = "classifier"
"""The linear layer that some routers keep their matrix in."""
_SCORES: dict[Scoring, Callable[[Tensor], Tensor]] = {
    Scoring.SOFTMAX: lambda logits: logits.softmax(-1),
    Scoring.SIGMOID: torch.sigmoid,
}
_GROUP_SCORES: tuple[Literal["max", "top2"], ...] = ("max", "top2")  # the second is for groups of two and more
_ROWS = 256
_MOST_EXPERTS = 4096  # asking takes a matrix of as many rows and columns


def route(logits: Tensor, spec: RouterSpec, bias: Tensor | None) -> Tensor:
    """Compute what the kernels compute, in plain torch: the weights as fp32 [T, E], 0 for experts that are not
    chosen.
    """
    scores = _SCORES[spec.scoring](logits)
    choice = scores if bias is None else scores + bias
    if spec.topk_groups < spec.num_groups:
        groups = choice.view(len(logits), spec.num_groups, -1)
        best = groups.amax(-1) if spec.group_score == "max" else groups.topk(2, dim=-1)[0].sum(-1)
        is_closed = torch.ones_like(best).scatter_(1, best.topk(spec.topk_groups, dim=-1)[1], 0).bool()
        choice = groups.masked_fill(is_closed[..., None], float("-inf")).flatten(1)
    ids = choice.topk(spec.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if spec.renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return torch.zeros_like(scores).scatter_(1, ids, weights * spec.scaling)


@recognizer("a router that kernels compute")
def recognize_router(module: nn.Module) -> RouterSpec:
    """Return how `module` routes; None when no kernel routes so.

    Its own forward runs on made-up logits: its weight is the identity. A parameter `bias` [E] must be added to the
    logits, before anything else.
    """
    child = module._modules.get(ROUTER_CHILD)
    weight = getattr(child or module, "weight", None)
    buffers = {name for name, buffer in module.named_buffers()}
    names = {name for name, _ in module.named_parameters()}
    names = {name.removeprefix(f"{ROUTER_CHILD}.") for name in names}
    if not isinstance(weight, Tensor) or weight.dim() != 2 or set(module._modules) - {ROUTER_CHILD}:
        raise NotRecognized("it is not one matrix")
    if child is not None and names != {"weight"}:
        raise NotRecognized("it has a matrix in a child, and more")
    if others := (buffers - {CHOICE_BIAS}) | (names - {"weight", "bias"}):
        raise NotRecognized(f"beside a weight and biases it holds {', '.join(sorted(others))}")
    if len(weight) > _MOST_EXPERTS:
        raise NotRecognized(f"it has more than {_MOST_EXPERTS} experts")
    experts, probe_inputs = len(weight), ProbeInputs()
    logits = probe_inputs.normal(_ROWS, experts, scale=2.0)
    logits[::2] *= 0.1  # where one expert has most of the score, groups rank alike by their best and their best two
    choice_bias = {name: probe_inputs.normal(experts, scale=0.1) for name in buffers}
    logit_bias = {name: probe_inputs.normal(experts) for name in names - {"weight"}}
    held: dict[str, Tensor] = {"weight": torch.eye(experts), **logit_bias}
    if child is not None:
        matrix = nn.Linear(experts, experts, bias=False)
        matrix.weight = nn.Parameter(held["weight"])
        probe = probe_module(module, modules={ROUTER_CHILD: matrix}, buffers=choice_bias, hidden_dim=experts)
    else:
        probe = probe_module(module, parameters=held, buffers=choice_bias, hidden_dim=experts)
    got_logits, want, top_k = answer(lambda: _routed(probe, logits))
    logits = logits + sum(logit_bias.values())
    if not close(got_logits, logits):
        raise NotRecognized("its logits are not its matrix times its rows")
    bias = choice_bias.get(CHOICE_BIAS)
    specs = answer(lambda: list(_candidates(module, experts, top_k)))  # of counts that may fit no spec
    return matching(want, specs, lambda spec: route(logits, spec, bias))


def _routed(probe: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor, int]:
    """Logits, weights [T, E] as `route` gives them, and how many experts a row has."""
    logits, weights, ids = probe(rows)
    return logits, torch.zeros(rows.shape).scatter_(1, ids, weights.float()), ids.shape[-1]


def _candidates(module: nn.Module, experts: int, top_k: int) -> Iterator[RouterSpec]:
    """Every spec with the module's own numbers that the kernel can compute."""
    named = (getattr(module, name, None) for name in ("num_group", "n_group"))
    num_groups = next((n for n in named if isinstance(n, int) and n > 1 and experts % n == 0), 1)
    topk_groups = getattr(module, "topk_group", None)
    groups = {(1, 1)}
    if num_groups > 1 and isinstance(topk_groups, int) and topk_groups <= num_groups:
        groups.add((num_groups, topk_groups))
    factor = getattr(module, "routed_scaling_factor", None)
    factors = {1.0, float(factor) if isinstance(factor, (int, float)) else 1.0}
    for (count, chosen), scaling, renormalize in product(sorted(groups, reverse=True), factors, (True, False)):
        for group_score, scoring in product(_GROUP_SCORES[: experts // count], _SCORES):
            yield RouterSpec(top_k, scoring, count, chosen, group_score, renormalize, scaling)
