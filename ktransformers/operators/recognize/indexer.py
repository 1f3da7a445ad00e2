"""Recognizes an indexer of sparse attention by its own choices on made-up projections.

    T rows, H index heads, D columns of one, M positions of a unit: 1, of a block, or of a pool

All indexers score, choose the best units and, of equal ones, the lower: `_choose` is the one formula. They differ in
what a unit is (Granularity), in how keys become what is scored, and in the names of their parts (`_WAYS`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    StandIn,
    answer,
    made_of,
    matching,
    probe_module,
    recognizer,
)
from ktransformers.operators.rotation import rotated_columns

__all__ = ["Granularity", "IndexSpec", "recognize_indexer"]

_ROWS, _SIZE, _CHOSEN = 33, 2, 4  # of a probe: rows, positions of a unit, units that are chosen


class Granularity(Enum):
    """Units of positions that an indexer chooses; the value is how the log names such an indexer."""

    POSITION = "an indexer that kernels compute"
    """Single positions, for all heads of latent attention (DeepSeek-V3.2)."""
    BLOCK = "an indexer of blocks that kernels compute"
    """Blocks, by the best of their positions, for each KV head (MiniMax-M3)."""
    POOL = "an indexer of pools that kernels compute"
    """Pools, by an entry made of their keys; those behind the last whole pool are chosen always (GLM-5.3, Qwen4)."""


@dataclass(frozen=True, slots=True)
class IndexSpec:
    """Numbers of an indexer: heads of its queries, columns of one, positions of a unit, and how many units are chosen.

    score of a key or entry = sum_h weights[h] * head_scale * max(scale * q[h] . k, 0), or for each head apart, of
    blocks: scale * q . k

    num_local: the last blocks that a row sees are chosen in any case. rotary_dim: columns that are rotated, the last
    ones with is_last; 0: those that attention rotates, or none. is_gated: entries are sums of a pool's keys weighted by
    gates of their own, and rows weight heads (GLM-5.3); else they are means, with a norm and rotated as their first
    position, and heads count alike (Qwen4).
    """

    granularity: Granularity
    num_heads: int
    head_dim: int
    num_chosen: int
    scale: float
    size: int = 1
    head_scale: float = 1.0
    num_local: int = 0
    rotary_dim: int = 0
    is_interleaved: bool = False
    is_last: bool = False
    is_gated: bool = False

    @property
    def cached_dim(self) -> int:
        """Number of columns that a position leaves in the cache: its key, and its gates."""
        return 2 * self.head_dim if self.is_gated else self.head_dim

    @property
    def block(self) -> int:
        """Number of keys or entries that are chosen together."""
        return self.size if self.granularity is Granularity.BLOCK else 1

    def rotated_first(self, x: Tensor) -> Tensor:
        """Return [..., D] with the columns in front that are rotated. Products of queries and keys stay what
        they are.
        """
        return x.roll(self.rotary_dim, dims=-1) if self.is_last else x


def _fixed(value: Tensor) -> StandIn:
    """A projection that gives the same whatever it is given."""
    return StandIn(lambda x: value)


def _unchanged() -> StandIn:
    """A norm that changes nothing."""
    return StandIn(lambda x: x)


@dataclass(frozen=True, slots=True)
class _Given:
    """What made-up projections give: q [T, H, D], k [T, D], weights [T, H], gates [T, D], bias [M, D], and angles."""

    q: Tensor
    k: Tensor
    weights: Tensor
    gates: Tensor
    bias: Tensor
    angles: Tensor

    @classmethod
    def of(cls, spec: IndexSpec) -> _Given:
        normal, heads, dim = ProbeInputs().normal, spec.num_heads, spec.head_dim
        made = normal(_ROWS, heads, dim), normal(_ROWS, dim), normal(_ROWS, heads), normal(_ROWS, dim)
        bias, angles = normal(_SIZE, dim), normal(_ROWS, spec.rotary_dim // 2 or max(dim // 4, 1))
        if spec.granularity is Granularity.BLOCK:  # how it is rotated, its attention shows
            angles = torch.zeros(_ROWS, dim // 2)
        return cls(*made, bias, angles)

    @property
    def embeddings(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines as models give them: twice side by side."""
        twice = torch.cat((self.angles, self.angles), dim=-1)[None]
        return twice.cos(), twice.sin()


def recognize_indexer(module: nn.Module, granularity: Granularity = Granularity.POSITION) -> IndexSpec | None:
    """Return how `module` chooses units of this granularity; None when it does something else."""
    return _RECOGNIZERS[granularity](module)


def _recognized(module: nn.Module, *, granularity: Granularity) -> IndexSpec:
    parts = made_of(module)
    ways = (way for way in _WAYS if way.granularity is granularity and parts == way.parts)
    way = next((way for way in ways if hasattr(module, way.mark)), None)
    if way is None:
        raise NotRecognized("it is made of other parts")
    specs = way.specs(module)
    given = _Given.of(specs[0])
    want = answer(lambda: way.ask(module, given) * _seen())
    return matching(want, specs, lambda spec: _choose(given, spec))


_RECOGNIZERS = {each: recognizer(each.value)(partial(_recognized, granularity=each)) for each in Granularity}


def _position_specs(module: Any) -> list[IndexSpec]:
    heads, dim, rotary = (int(getattr(module, name)) for name in ("n_heads", "head_dim", "qk_rope_head_dim"))
    if not 0 < rotary <= dim or rotary % 2:
        raise NotRecognized(f"it rotates {rotary} of {dim} columns")
    sizes = (Granularity.POSITION, heads, dim, int(module.index_topk), float(module.softmax_scale))
    return [
        IndexSpec(
            *sizes, head_scale=heads**-0.5, rotary_dim=rotary, is_interleaved=is_interleaved, is_last=is_last
        )
        for is_interleaved, is_last in product((False, True), repeat=2)
    ]  # fmt: skip


def _block_specs(module: Any) -> list[IndexSpec]:
    heads, dim, size = (int(getattr(module, name)) for name in ("num_heads", "head_dim", "block_size"))
    chosen, local = int(module.topk_blocks), int(module.local_blocks)
    if not 0 <= local <= chosen:
        raise NotRecognized(f"it chooses {chosen} blocks and {local} of them always")
    return [IndexSpec(Granularity.BLOCK, heads, dim, chosen, 1.0, size, num_local=local)]


def _gated_specs(module: Any) -> list[IndexSpec]:
    heads, dim, size = (int(getattr(module, name)) for name in ("n_heads", "head_dim", "index_kpool"))
    if not module.index_kpool_always_select_tail:
        raise NotRecognized(
            "it leaves out the positions behind the last whole pool, so that the first rows see nothing"
        )
    if int(module.index_topk) % size:
        raise NotRecognized(f"it chooses {module.index_topk} positions in pools of {size}")
    sizes = (Granularity.POOL, heads, dim, int(module.index_topk) // size, float(module.softmax_scale), size)
    return [IndexSpec(*sizes, head_scale=heads**-0.5, is_gated=True)]


def _mean_specs(module: Any) -> list[IndexSpec]:
    heads, keys, dim = (int(getattr(module, f"index_{name}")) for name in ("n_heads", "kv_heads", "head_dim"))
    if keys != 1:
        raise NotRecognized(f"it has {keys} heads of keys")
    chosen, size = int(module.block_topk), int(module.compress_ratio)
    return [IndexSpec(Granularity.POOL, heads, dim, chosen, dim**-0.5, size)]


def _lightning(given: _Given) -> dict[str, nn.Module]:
    """Parts of the indexers of latent attention."""
    return {
        "wq_b": _fixed(given.q.flatten(1)[None]),
        "wk": _fixed(given.k[None]),
        "k_norm": _unchanged(),
        "weights_proj": _fixed(given.weights[None]),
    }


def _mask(chosen: Tensor, count: int) -> Tensor:
    """[..., count] of 0 and 1, of the numbers [..., K] that were chosen, below 0 for none."""
    mask = torch.zeros(*chosen.shape[:-1], count + 1)
    return mask.scatter(-1, torch.where(chosen < 0, count, chosen), 1.0)[..., :count]


def _probe_positions(module: nn.Module, given: _Given) -> Tensor:
    """The module's choices as `_choose` returns them, whatever it says of positions that a row does not see."""
    probe = probe_module(module, modules=_lightning(given), index_topk=_CHOSEN)
    mask, rows = torch.full((1, _ROWS, _ROWS), float("-inf")).triu(1), torch.zeros(1, _ROWS, 8)
    return _mask(probe(rows, rows, given.embeddings, mask, torch.arange(_ROWS)[None])[0].long(), _ROWS)[:, None]


def _probe_blocks(module: nn.Module, given: _Given) -> Tensor:
    children = {
        "q_proj": _fixed(given.q.flatten(1)[None]),
        "k_proj": _fixed(given.k[None]),
        "q_norm": _unchanged(),
        "k_norm": _unchanged(),
    }
    local = _local(int(module.local_blocks))  # type: ignore[arg-type]
    probe = probe_module(module, modules=children, block_size=_SIZE, topk_blocks=_CHOSEN, local_blocks=local)
    chosen = probe(torch.zeros(1, _ROWS, 8), given.embeddings, None, torch.arange(_ROWS)[None])[0]  # [H, T, K]
    return _of_positions(_mask(chosen.transpose(0, 1), -(-_ROWS // _SIZE)), _SIZE)


def _probe_gated(module: nn.Module, given: _Given) -> Tensor:
    parameters = {
        "index_kpool_compress_ape": given.bias,
        "index_kpool_compress_gate": torch.eye(given.gates.shape[1]),  # so that rows are the gates
    }
    probe = probe_module(
        module,
        modules=_lightning(given),
        parameters=parameters,
        index_topk=_CHOSEN * _SIZE,
        index_kpool=_SIZE,
    )
    rows = given.gates[None]
    return _mask(probe(rows, rows, torch.ones(1, _ROWS, dtype=torch.bool), None)[0].long(), _ROWS)[:, None]


def _probe_mean(module: nn.Module, given: _Given) -> Tensor:
    children = {
        "index_qk_proj": _fixed(torch.cat((given.q.flatten(1), given.k), dim=-1)[None]),
        "q_layernorm": _unchanged(),
        "k_layernorm": _unchanged(),
    }
    probe = probe_module(
        module,
        modules=children,
        compress_ratio=_SIZE,
        block_topk=_CHOSEN,
        token_budget=_CHOSEN * _SIZE,
    )
    causal = torch.ones(1, 1, _ROWS, _ROWS, dtype=torch.bool).tril()
    chosen: Tensor = probe(torch.zeros(1, _ROWS, 8), given.embeddings, causal, None)
    return chosen[0, 0].float()[:, None]


@dataclass(frozen=True, slots=True)
class _Way:
    """A way to ask an indexer: the names of its parts, an attribute that it has, its possible specs, its choices."""

    granularity: Granularity
    parts: frozenset[str]
    mark: str
    specs: Callable[[Any], list[IndexSpec]]
    ask: Callable[[nn.Module, _Given], Tensor]


_LIGHTNING = frozenset({"wq_b", "wk", "k_norm", "weights_proj"})
_BLOCKS = frozenset({"q_proj", "k_proj", "q_norm", "k_norm"})
_MEAN = frozenset({"index_qk_proj", "q_layernorm", "k_layernorm"})
_WAYS = (
    _Way(Granularity.POSITION, _LIGHTNING, "n_heads", _position_specs, _probe_positions),
    _Way(Granularity.BLOCK, _BLOCKS, "num_heads", _block_specs, _probe_blocks),
    _Way(Granularity.POOL, _LIGHTNING, "index_kpool", _gated_specs, _probe_gated),
    _Way(Granularity.POOL, _MEAN, "compress_ratio", _mean_specs, _probe_mean),
)


def _seen() -> Tensor:
    """[T, 1, T]: 1 for the positions that a row sees."""
    return torch.ones(_ROWS, _ROWS).tril()[:, None]


def _local(num_local: int) -> int:
    """How many blocks a probe chooses always: fewer than it chooses."""
    return min(num_local, _CHOSEN - 1)


def _of_positions(units: Tensor, size: int) -> Tensor:
    """[..., T] of the positions of units [..., N]."""
    wide = units.repeat_interleave(size, dim=-1)
    return torch.nn.functional.pad(wide, (0, _ROWS - wide.shape[-1]))


def _choose(given: _Given, spec: IndexSpec) -> Tensor:
    """Choose for rows 0 .. T - 1 of one sequence, in plain torch: fp32 [T, H or 1, T], 1 for a position that is chosen,
    else 0."""
    q, keys, per_key = _scored(given, spec)
    row = torch.arange(_ROWS)[:, None]
    scores = torch.einsum("thd,nd->thn", q, keys) * spec.scale
    if spec.granularity is not Granularity.BLOCK:
        is_weighted = spec.granularity is Granularity.POSITION or spec.is_gated
        weights = given.weights * spec.head_scale if is_weighted else torch.ones_like(given.weights)
        scores = torch.einsum("th,thn->tn", weights, scores.relu())[:, None]
    whole = (row + 1) // per_key
    scores = scores.masked_fill((torch.arange(len(keys)) >= whole)[:, None], float("-inf"))
    if spec.granularity is Granularity.BLOCK:
        scores = _best_of_blocks(scores, _local(spec.num_local))
    values, best = scores.topk(_CHOSEN, dim=-1)
    chosen = torch.zeros_like(scores).scatter(-1, best, (values > float("-inf")).float())
    mask = _of_positions(chosen, 1 if spec.granularity is Granularity.POSITION else _SIZE)
    if spec.granularity is Granularity.POOL:
        mask = torch.where((torch.arange(_ROWS) >= whole * per_key)[:, None], 1.0, mask)
    return mask * _seen()


def _scored(given: _Given, spec: IndexSpec) -> tuple[Tensor, Tensor, int]:
    """Queries [T, H, D], what they are multiplied with [N, D], and how many positions one of that stands for."""
    if spec.granularity is not Granularity.POOL:
        cos, sin = given.angles.cos(), given.angles.sin()
        rows = (spec.rotated_first(x) for x in (given.q, given.k[:, None]))
        q, k = (rotated_columns(x, cos, sin, is_interleaved=spec.is_interleaved) for x in rows)
        return q, k[:, 0], 1
    count = _ROWS // _SIZE
    keys, gates = (x[: count * _SIZE].view(count, _SIZE, -1) for x in (given.k, given.gates))
    if spec.is_gated:
        return given.q, ((gates + given.bias).softmax(dim=1) * keys).sum(1), _SIZE
    firsts = given.angles[: count * _SIZE : _SIZE]
    entries = rotated_columns(keys.mean(1)[:, None], firsts.cos(), firsts.sin())[:, 0]
    return rotated_columns(given.q, given.angles.cos(), given.angles.sin()), entries, _SIZE


def _best_of_blocks(scores: Tensor, num_local: int) -> Tensor:
    """[T, H, blocks] of the scores [T, H, T] of positions; infinite for the last blocks that a row sees."""
    padded = torch.nn.functional.pad(scores, (0, -_ROWS % _SIZE), value=float("-inf"))
    blocks = padded.view(*scores.shape[:2], -1, _SIZE).amax(-1)
    back = torch.arange(_ROWS)[:, None, None] // _SIZE - torch.arange(blocks.shape[-1])
    return blocks.masked_fill((back >= 0) & (back < num_local), float("inf"))
