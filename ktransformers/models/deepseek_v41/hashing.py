"""Hashes of n-grams by which DeepSeek-V4.1's Engram tables are looked up: each number follows from config or tokenizer.

    c = number of a token among those that read alike          N n-gram sizes up to, H hashes of each
    hash of n tokens  = c[p] m[0] ^ c[p-1] m[1] ^ ... ^ c[p-n+1] m[n-1]        what is before the text counts as padding
    row of the table  = first row of (n, head) + hash mod the prime of (n, head)

As the published model's own code has them. Knows tokenizer.json; no weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from ktransformers.errors import ConfigError
from ktransformers.models.deepseek_v41.configuration import DeepseekV41Config

__all__ = ["EngramLayout", "alike_tokens", "table_rows", "token_map"]

_SPACE = "\ue000"  # stands for a token that is one space, which Strip would make empty
_LAYER_SEED = 10007
_MOST = (1 << 63) - 1
_WITNESSES = (2, 3, 5, 7, 11, 13)  # enough for Miller-Rabin below 3.4e12


@dataclass(frozen=True, slots=True)
class EngramLayout:
    """Numbers of one layer's table. multipliers: of a token and of those before it. primes, offsets: [N - 1][H]."""

    multipliers: tuple[int, ...]
    primes: tuple[tuple[int, ...], ...]
    offsets: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, config: DeepseekV41Config, layer: int) -> EngramLayout:
        """Return the layout of a layer that has a table. Raises ConfigError where its rows are too few."""
        layers = list(config.engram_layer_ids or ())
        place = layers.index(layer)
        sizes, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
        rows = (config.engram_num_embeddings or [])[place]
        if sizes < 1 or heads < 1 or sizes * heads * config.engram_vocab_size > rows:
            raise ConfigError(
                f"engram_num_embeddings says {rows} rows for layer {layer}, whose {sizes} x {heads} hashes have "
                f"{config.engram_vocab_size} each"
            )
        own, total = _primes(config.engram_vocab_size, len(layers), sizes, heads)[place], 0
        offsets = []
        for buckets in own:
            offsets.append(tuple(total + sum(buckets[:head]) for head in range(heads)))
            total += sum(buckets)
        if total > rows:
            raise ConfigError(f"engram_num_embeddings says {rows} rows for layer {layer}, whose hashes need {total}")
        bound = max(1, _MOST // config.engram_compressed_vocab_size // 2)
        random = np.random.default_rng(_LAYER_SEED * layer)
        drawn = random.integers(0, bound, size=config.engram_max_ngram_size, dtype=np.int64)
        return cls(tuple(2 * int(one) + 1 for one in drawn), own, tuple(offsets))


def table_rows(layout: EngramLayout, numbers: Sequence[Tensor]) -> Tensor:
    """Hash n-grams to rows of a table, int64 [T, (N - 1) H]. numbers: of T tokens, and of those 1 .. N - 1 before each,
    int64 [T] each."""
    mixed, found = numbers[0] * layout.multipliers[0], []
    for back, (primes, offsets) in enumerate(zip(layout.primes, layout.offsets, strict=True), 1):
        mixed = mixed ^ numbers[back] * layout.multipliers[back]
        found.append(torch.remainder(mixed[:, None], torch.tensor(primes)) + torch.tensor(offsets))
    return torch.cat(found, dim=-1)


@lru_cache(maxsize=8)
def _primes(first: int, layers: int, sizes: int, heads: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """The sizes of all hashes' tables, [layer][n-gram][head]: each n-gram of each layer takes the next primes from
    `first` on that no other has."""
    used: set[int] = set()

    def taken() -> tuple[int, ...]:
        found: list[int] = []
        number = first
        while len(found) < heads:
            if number not in used and _is_prime(number):
                used.add(number)
                found.append(number)
            number += 1
        return tuple(found)

    return tuple(tuple(taken() for _ in range(sizes)) for _ in range(layers))


def _is_prime(number: int) -> bool:
    if number < 2 or any(number % prime == 0 for prime in _WITNESSES):
        return number in _WITNESSES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    return all(_passes(number, witness, odd, twos) for witness in _WITNESSES)


def _passes(number: int, witness: int, odd: int, twos: int) -> bool:
    power = pow(witness, odd, number)
    if power in (1, number - 1):
        return True
    for _ in range(twos - 1):
        power = power * power % number
        if power == number - 1:
            return True
    return False


def alike_tokens(tokenizer: Tokenizer) -> list[int]:
    """Number tokens by how they read, without case, accents and kinds of spaces: a number for each token id, in the
    order of their first ones."""
    readable = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
    numbers: dict[str, int] = {}
    found = []
    for token_id in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        is_part = "\ufffd" in text  # of a character
        key = str(tokenizer.id_to_token(token_id)) if is_part else readable.normalize_str(text) or text
        found.append(numbers.setdefault(key, len(numbers)))
    return found


@lru_cache(maxsize=2)
def token_map(folder: str, num_numbers: int) -> tuple[int, ...]:
    """Return `alike_tokens` of the tokenizer.json in a model's folder, which gives num_numbers of them.

    Raises ConfigError where there is none, or it gives another number: all hashes follow from it.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json, by which the model's tables of n-grams are looked up")
    found = tuple(alike_tokens(Tokenizer.from_file(str(file))))
    if len(set(found)) != num_numbers:
        raise ConfigError(
            f"{file}: {len(set(found))} tokens read differently, and the model's config says "
            f"engram_compressed_vocab_size {num_numbers}; they do not belong together"
        )
    return found
