"""Recognizes an indexer of pools of positions (GLM-5.3, Qwen4) by its own choices on made-up projections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import NotRecognized, ProbeInputs, answer, close, probe_module, recognizer

__all__ = ["PoolSpec", "recognize_pooled_indexer"]

_ROWS, _POOL, _CHOSEN = 33, 2, 4
_GATED = frozenset({"wq_b", "wk", "k_norm", "weights_proj"})
_MEAN = frozenset({"index_qk_proj", "q_layernorm", "k_layernorm"})


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """Numbers of an indexer of pools: heads of the queries, columns of one, positions of a pool, and how many pools are
    chosen.

    score of a pool = sum_h weights[h] * head_scale * max(scale * q[h] . entry, 0)

    is_gated: entries are sums of a pool's keys weighted by gates of their own, and rows weight heads (GLM-5.3); else
    they are means, with a norm and rotated as their first position, and heads count alike (Qwen4). The positions behind
    the last whole pool are chosen always.
    """

    num_heads: int
    head_dim: int
    pool: int
    num_chosen: int
    scale: float
    head_scale: float
    is_gated: bool

    @property
    def cached_dim(self) -> int:
        """Number of columns that a position leaves in the cache: its key, and its gates."""
        return 2 * self.head_dim if self.is_gated else self.head_dim


class _Fixed(nn.Module):
    def __init__(self, value: Tensor):
        super().__init__()
        self.value, self.weight = value, value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


@dataclass(frozen=True, slots=True)
class _Given:
    """What made-up projections give: q [T, H, D], k [T, D], weights [T, H], gates [T, D], bias [M, D], angles."""

    q: Tensor
    k: Tensor
    weights: Tensor
    gates: Tensor
    bias: Tensor
    angles: Tensor


@recognizer("an indexer of pools that kernels compute")
def recognize_pooled_indexer(module: nn.Module) -> PoolSpec:
    """Return how `module` chooses pools of positions; None when that is something else."""
    children = {name for name, _ in module.named_children()}
    if children == _GATED and hasattr(module, "index_kpool"):
        spec, ask = _gated_spec(module), _asked_gated
    elif children == _MEAN and hasattr(module, "compress_ratio"):
        spec, ask = _mean_spec(module), _asked_mean
    else:
        raise NotRecognized("it is made of other parts")
    probe_inputs, heads, dim = ProbeInputs(), spec.num_heads, spec.head_dim
    given = _Given(
        probe_inputs.normal(_ROWS, heads, dim),
        probe_inputs.normal(_ROWS, dim),
        probe_inputs.normal(_ROWS, heads),
        probe_inputs.normal(_ROWS, dim),
        probe_inputs.normal(_POOL, dim),
        probe_inputs.normal(_ROWS, max(dim // 4, 1)),
    )
    want = answer(lambda: ask(module, given))
    if not close(_choose(given, spec), want):
        raise NotRecognized("no formula that kernels know gives its choices")
    return spec


def _gated_spec(module: nn.Module) -> PoolSpec:
    sized: Any = module
    heads, dim, pool = (int(getattr(sized, name)) for name in ("n_heads", "head_dim", "index_kpool"))
    if not sized.index_kpool_always_select_tail:
        raise NotRecognized(
            "it leaves out the positions behind the last whole pool, so that the first rows see nothing"
        )
    if int(sized.index_topk) % pool:
        raise NotRecognized(f"it chooses {sized.index_topk} positions in pools of {pool}")
    chosen = int(sized.index_topk) // pool
    return PoolSpec(heads, dim, pool, chosen, float(sized.softmax_scale), heads**-0.5, is_gated=True)


def _mean_spec(module: nn.Module) -> PoolSpec:
    sized: Any = module
    heads, keys, dim = (int(getattr(sized, f"index_{name}")) for name in ("n_heads", "kv_heads", "head_dim"))
    if keys != 1:
        raise NotRecognized(f"it has {keys} heads of keys")
    return PoolSpec(heads, dim, int(sized.compress_ratio), int(sized.block_topk), dim**-0.5, 1.0, is_gated=False)


def _asked_gated(module: nn.Module, given: _Given) -> Tensor:
    """The module's choices, fp32 [T, T] of 0 and 1."""
    children = {
        "wq_b": _Fixed(given.q.flatten(1)[None]),
        "wk": _Fixed(given.k[None]),
        "k_norm": nn.Identity(),
        "weights_proj": _Fixed(given.weights[None]),
    }
    parameters = {
        "index_kpool_compress_ape": given.bias,
        "index_kpool_compress_gate": torch.eye(given.gates.shape[1]),  # so that rows are the gates
    }
    probe = probe_module(
        module, modules=children, parameters=parameters, index_topk=_CHOSEN * _POOL, index_kpool=_POOL
    )  # fmt: skip
    rows = given.gates[None]
    chosen = probe(rows, rows, torch.ones(1, _ROWS, dtype=torch.bool), None)[0].long()
    mask = torch.zeros(_ROWS, _ROWS + 1)
    return mask.scatter(-1, torch.where(chosen < 0, _ROWS, chosen), 1.0)[:, :_ROWS]


def _asked_mean(module: nn.Module, given: _Given) -> Tensor:
    """The same. Its norms, which change nothing here, are operators of their own."""
    children = {
        "index_qk_proj": _Fixed(torch.cat((given.q.flatten(1), given.k), dim=-1)[None]),
        "q_layernorm": nn.Identity(),
        "k_layernorm": nn.Identity(),
    }
    probe = probe_module(
        module, modules=children, compress_ratio=_POOL, block_topk=_CHOSEN, token_budget=_CHOSEN * _POOL
    )  # fmt: skip
    twice = torch.cat((given.angles, given.angles), dim=-1)[None]
    causal = torch.ones(1, 1, _ROWS, _ROWS, dtype=torch.bool).tril()
    chosen: Tensor = probe(torch.zeros(1, _ROWS, 8), (twice.cos(), twice.sin()), causal, None)
    return chosen[0, 0].float()


def _choose(given: _Given, spec: PoolSpec) -> Tensor:
    """The same of rows 0 .. T - 1 of one sequence, in plain torch."""
    count = _ROWS // _POOL
    keys = given.k[: count * _POOL].view(count, _POOL, -1)
    q, weights = given.q, given.weights * spec.head_scale
    if spec.is_gated:
        gates = given.gates[: count * _POOL].view(count, _POOL, -1) + given.bias
        entries = (gates.softmax(dim=1) * keys).sum(1)
    else:
        q, weights = _turned(q, given.angles), torch.ones_like(weights)
        entries = _turned(keys.mean(1)[:, None], given.angles[: count * _POOL : _POOL])[:, 0]
    scores = (torch.einsum("thd,sd->ths", q, entries) * spec.scale).relu()
    total = torch.einsum("th,ths->ts", weights, scores)
    whole = (torch.arange(_ROWS) + 1) // _POOL
    total = total.masked_fill(torch.arange(count) >= whole[:, None], float("-inf"))
    values, best = total.topk(_CHOSEN, dim=-1)
    chosen = torch.zeros(_ROWS, count).scatter(-1, best, (values > float("-inf")).float())
    mask = torch.cat((chosen.repeat_interleave(_POOL, 1), torch.zeros(_ROWS, _ROWS - count * _POOL)), dim=-1)
    at, row = torch.arange(_ROWS), torch.arange(_ROWS)[:, None]
    return torch.where((at >= whole[:, None] * _POOL) & (at <= row), 1.0, mask)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    half = angles.shape[-1]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half : 2 * half]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., 2 * half :]), dim=-1)
