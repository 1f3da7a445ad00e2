"""Numbers by which embeddings of n-grams are looked up (Qwen4's per-layer embeddings): each follows from the config."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count

__all__ = ["hash_multipliers", "primes_from"]

_MASK = (1 << 64) - 1
_LAYER_PRIME = 10007


def _split_mix(state: int) -> int:
    """The output of SplitMix64 (Steele, Lea, Flood 2014) behind `state`."""
    mixed = (state + 0x9E3779B97F4A7C15) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ mixed >> shift) * factor & _MASK
    return mixed ^ mixed >> 31


def hash_multipliers(vocab_size: int, ngram_size: int, layer_index: int, seed: int) -> list[int]:
    """Return odd factors of a token and of those before it in the hash of an n-gram; products with ids stay
    below 2^63.
    """
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    first = seed + _LAYER_PRIME * layer_index
    states = ((first + 0x9E3779B97F4A7C15 * (index + 1)) & _MASK for index in range(ngram_size))
    return [2 * (_split_mix(state) % half) + 1 for state in states]


def primes_from(first: int) -> Iterator[int]:
    """Yield the primes that are not below `first`, from the least up: sizes of the tables of n-grams, a hash each."""
    for number in count(max(first, 2)):
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            yield number
