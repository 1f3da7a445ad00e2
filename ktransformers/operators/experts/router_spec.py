"""Which routers one kernel can stand in for: found by asking the module, as everywhere, not by family names.

The module's own forward runs on made-up logits (its weight is the identity), and so does every way to route that the
kernel knows; the one that gives the same experts and weights is taken. Knows numbers; no tokens, no devices.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ktransformers.kernels.cpu.routing import RouterSpec

__all__ = ["BIAS", "recognize_routing", "route"]

BIAS = "e_score_correction_bias"
_ROWS = 64


def route(logits: torch.Tensor, spec: RouterSpec, bias: torch.Tensor | None) -> torch.Tensor:
    """What the kernels compute, in plain torch: the weights as fp32 [T, E], 0 for experts that are not chosen."""
    scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
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


_MOST_EXPERTS = 4096  # asking takes a matrix of as many rows and columns


def recognize_routing(module: Any) -> RouterSpec | None:
    """The spec that routes as `module` does, up to rounding; None when none does.

    A parameter `bias` [E] of the module must be added to the logits, before anything else.
    """
    weight = getattr(module, "weight", None)
    buffers = {name for name, buffer in module._buffers.items() if buffer is not None}
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2 or not buffers <= {BIAS}:
        return None
    if weight.shape[0] > _MOST_EXPERTS:
        return None
    names = {name for name, _ in module.named_parameters()}
    if any(True for _ in module.children()) or not names <= {"weight", "bias"}:
        return None
    experts, generator = weight.shape[0], torch.Generator().manual_seed(0)
    logits = torch.randn(_ROWS, experts, generator=generator) * 2
    bias = torch.randn(experts, generator=generator) * 0.1 if buffers else None
    twin = copy.copy(module)
    made, want_logits = {"weight": torch.eye(experts)}, logits
    if "bias" in names:
        made["bias"] = torch.randn(experts, generator=generator)
        want_logits = logits + made["bias"]
    twin.__dict__["_parameters"] = {name: nn.Parameter(t, requires_grad=False) for name, t in made.items()}
    twin.__dict__["_buffers"] = {} if bias is None else {BIAS: bias}
    twin.hidden_dim = experts
    try:
        got_logits, weights, ids = twin(logits)
        want = torch.zeros(_ROWS, experts).scatter_(1, ids, weights.float())
    except Exception:  # noqa: BLE001 - any router of any family may be asked, and may refuse in any way
        return None
    if not isinstance(got_logits, torch.Tensor) or not torch.equal(got_logits, want_logits):
        return None
    logits = want_logits
    candidates = _candidates(module, experts, ids.shape[-1])
    try:
        return next((s for s in candidates if torch.allclose(route(logits, s, bias), want, rtol=1e-4, atol=1e-6)), None)
    except ValueError:  # counts that no spec takes
        return None


def _candidates(module: Any, experts: int, top_k: int) -> Iterator[RouterSpec]:
    """Every spec with the module's own numbers that the kernel can compute."""
    named = (getattr(module, name, None) for name in ("num_group", "n_group"))
    num_groups = next((n for n in named if isinstance(n, int) and n > 1 and experts % n == 0), 1)
    topk_groups = getattr(module, "topk_group", None)
    groups = {(1, 1)}
    if num_groups > 1 and isinstance(topk_groups, int) and topk_groups <= num_groups:
        groups.add((num_groups, topk_groups))
    factor = getattr(module, "routed_scaling_factor", None)
    for count, chosen in sorted(groups, reverse=True):
        for scaling in {1.0, float(factor) if isinstance(factor, (int, float)) else 1.0}:
            for renormalize in (True, False):
                yield RouterSpec(top_k, "softmax", count, chosen, "max", renormalize, scaling)
                yield RouterSpec(top_k, "sigmoid", count, chosen, "max", renormalize, scaling)
                if experts // count >= 2:
                    yield RouterSpec(top_k, "softmax", count, chosen, "top2", renormalize, scaling)
                    yield RouterSpec(top_k, "sigmoid", count, chosen, "top2", renormalize, scaling)
