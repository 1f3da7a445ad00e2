"""Sampling in numpy and fp64, the obvious way: what the native sampler is compared with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ktransformers.core import SamplingParams

_MASK, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10 of N counters [N, 4] under N keys [N, 2], 32-bit words held in uint64. Returns [N, 4]."""
    a, b, c, d = (counters[:, i] for i in range(4))
    key0, key1 = keys[:, 0], keys[:, 1]
    for _ in range(10):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        a, b, c, d = (second >> _HALF) ^ b ^ key0, second & _MASK, (first >> _HALF) ^ d ^ key1, first & _MASK
        key0, key1 = (key0 + np.uint64(0x9E3779B9)) & _MASK, (key1 + np.uint64(0xBB67AE85)) & _MASK
    return np.stack([a, b, c, d], axis=1)


def candidates(
    logits: npt.NDArray[np.float32], params: SamplingParams
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Ascending ids of the tokens that can be chosen, and their weights; the best of all tokens has 1."""
    ids = np.arange(logits.size)
    if 0 < params.top_k < logits.size:
        ids = np.flatnonzero(logits >= np.sort(logits)[-params.top_k])
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits[ids].astype(np.float64) - float(logits.max())) / params.temperature)
    weights[weights < 2.0**-64] = 0.0
    keep = weights > 0
    if params.top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        reached = np.cumsum(weights[order]) >= params.top_p * weights.sum()
        count = int(np.argmax(reached)) + 1 if reached.any() else order.size
        keep[order[count:]] = False
    keep &= weights >= params.min_p
    return ids[keep], weights[keep]


def choose(logits: npt.NDArray[np.float32], params: SamplingParams, number: float) -> int:
    """The token for adjusted logits [V] and a number in [0, 1)."""
    if params.is_greedy:
        return int(np.argmax(logits))
    ids, weights = candidates(logits, params)
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, number * cumulative[-1], side="right"))
    return int(ids[min(index, ids.size - 1)])
