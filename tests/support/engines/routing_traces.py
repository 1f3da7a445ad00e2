"""Made-up routing of decode steps: even, skewed as published (a quarter of the experts has most picks), shifting."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Step = tuple[Ints, Ints]

SKEW = 9.0
"""Odds of an expert of the hot quarter. For 2 of 16 and 8 of 128 experts a token: 69 to 73 % of the picks."""


def trace(
    steps: int, layers: int, experts: int, top_k: int, *, skew: float = 1.0, shift_every: int = 0, seed: int = 0
) -> Iterator[Step]:
    """(layer, expert) [n] of steps of one token, drawn without replacement. shift_every: steps after which each layer's
    hot quarter is another one; 0: never."""
    generator = np.random.default_rng(seed)
    logits = np.zeros((layers, experts))
    layer = np.repeat(np.arange(layers), top_k)
    for number in range(steps):
        if number == 0 or (shift_every and number % shift_every == 0):
            logits[:] = 0.0
            order = np.argsort(generator.random((layers, experts)), axis=1)
            np.put_along_axis(logits, order[:, : experts // 4], np.log(skew), axis=1)
        keys = logits + generator.gumbel(size=logits.shape)
        yield layer, np.argsort(-keys, axis=1)[:, :top_k].ravel()


def best_hits(steps: list[Step], layers: int, slots: int) -> int:
    """Belady's bound: hits of caches of `slots` experts a layer, each of which gives up what is needed last, of steps
    whose experts are all read before any is brought in; an expert that is needed later than all others is not kept."""
    hits = 0
    for layer in range(layers):
        reads = [set(expert[layer_of == layer].tolist()) for layer_of, expert in steps]
        uses: dict[int, list[int]] = {}
        for number, read in enumerate(reads):
            for expert in read:
                uses.setdefault(expert, []).append(number)
        kept: set[int] = set(range(slots))  # whatever it begins with costs the policy nothing either
        for read in reads:
            hits += len(read & kept)
            for expert in read:
                uses[expert].pop(0)
            kept = set(sorted(kept | read, key=lambda e: uses.get(e) or [len(reads)])[:slots])
    return hits
