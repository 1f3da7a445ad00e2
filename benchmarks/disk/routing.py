"""Routers whose experts are chosen about equally often, or by a Zipf-like law. Knows no file.

Hidden states of a model of random weights are independent normal numbers, but for the first one: embeddings have the
same positive number there, which passes through the norms in front of the routers. So a router's first column is a
constant added to each expert's logit, and all else of its row is noise. What must be added for experts to be chosen as
often as wanted is found by trying, on numbers like these.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ktransformers.weights.synthetic import ROUTINGS, SKEWED_SHARE

__all__ = ["CONSTANT", "router_rows", "zipf_frequencies"]

CONSTANT = 1.72
"""The first hidden state, in standard deviations of the others: the largest number of a Q8_0 block of random ones."""

_MOST = 0.95
"""The most often that an expert is chosen, as a share of the tokens."""

_SPREAD = 0.02
"""Standard deviation of a router's weights, as of published ones."""

_SAMPLES, _ROUNDS = 8192, 60

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def zipf_frequencies(num_experts: int, top_k: int) -> F64:
    """Return how often the most, second most ... used expert is chosen, float64 [E]: a share of the tokens.

    The exponent is the one with which the first quarter has SKEWED_SHARE of the picks. All sum up to top_k, and none is
    above _MOST.
    """
    low, high, ranks = 0.0, 8.0, np.arange(1, num_experts + 1, dtype=np.float64)
    for _ in range(50):
        exponent = (low + high) / 2
        found = _capped(ranks**-exponent, top_k)
        is_less = found[: max(num_experts // 4, 1)].sum() < SKEWED_SHARE * top_k
        low, high = (exponent, high) if is_less else (low, exponent)
    return found


def _capped(weights: F64, total: float) -> F64:
    """In proportion to weights, but none above _MOST, with the sum `total`."""
    low, high = 0.0, total / weights[-1]
    for _ in range(100):
        scale = (low + high) / 2
        is_less = np.minimum(weights * scale, _MOST).sum() < total
        low, high = (scale, high) if is_less else (low, scale)
    found: F64 = np.minimum(weights * scale, _MOST)
    return found


@lru_cache
def _offsets(num_experts: int, top_k: int) -> tuple[float, ...]:
    """What is added to the logits, in standard deviations of them, by rank."""
    wanted = zipf_frequencies(num_experts, top_k)
    noise = np.random.Generator(np.random.SFC64(0)).standard_normal((_SAMPLES, num_experts), dtype=np.float32)
    offsets = np.zeros(num_experts, np.float32)
    for number in range(_ROUNDS):
        chosen = np.argpartition(-(noise + offsets), top_k - 1, axis=1)[:, :top_k]
        found = np.bincount(chosen.ravel(), minlength=num_experts) / _SAMPLES
        step = 0.5 if number < _ROUNDS // 2 else 0.1
        offsets += np.float32(step) * np.log(wanted / np.maximum(found, 0.5 / _SAMPLES)).astype(np.float32)
        offsets -= offsets.mean()
    return tuple(offsets.tolist())


def router_rows(shape: tuple[int, int], top_k: int, routing: str, seed: int) -> F32:
    """Return a router's weights, fp32 of shape [E, hidden]. routing: of ROUTINGS; which experts are popular depends on
    the seed.

    Raises ValueError for another routing, and for a top_k that chooses all experts.
    """
    num_experts, hidden = shape
    if routing not in ROUTINGS or not 0 < top_k < num_experts:
        raise ValueError(f"no {routing!r} routing to {top_k} of {num_experts} experts")
    generator = np.random.Generator(np.random.SFC64(seed))
    rows = generator.standard_normal(shape, dtype=np.float32) * np.float32(_SPREAD)
    rows[:, 0] = 0.0
    if routing != ROUTINGS[0]:
        offsets = np.array(_offsets(num_experts, top_k), np.float32)
        rows[generator.permutation(num_experts), 0] = offsets * np.float32(_SPREAD * hidden**0.5 / CONSTANT)
    return rows
