"""Finds the best tokens of rows of logits, so that few numbers leave the GPU. Knows no requests and no probabilities.

    N rows, V tokens, G groups of _GROUP tokens each, K: how many of the best are wanted, R: room for candidates

A call is two launches. The first leaves the greatest logit of each group; the second, one program a row, finds from
them where the best are: the K-th greatest of the groups is not above the K-th greatest logit, so that only groups from
there on are looked at. Logits are compared by their order, a whole number that ascends with them and is the same for
both zeros. A row with a logit that is not finite has neither best token nor candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.runtime import constant, jit, power_of_two, tl

__all__ = ["MAX_VOCAB", "BestTokens"]

_NOT_FINITE = constant(0x7FFFFFFF)
_LEAST = constant(-0x80000000)  # below the order of every logit
_GROUP = 64
_GROUPS = 32  # that a program of the first launch reads

MAX_VOCAB = 1 << 19
"""Tokens of a row at most: one program holds the orders of all groups."""


@jit
def _orders(x):
    """Of fp32 logits."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    return tl.where(magnitude >= 0x7F800000, _NOT_FINITE, tl.where(bits < 0, -magnitude, magnitude))


@jit
def _greatest_kernel(
    logits_ptr, greatest_ptr, logits_row, vocab, num_groups, GROUP: tl.constexpr, GROUPS: tl.constexpr
):  # fmt: skip
    """Grid (rows, cdiv(num_groups, GROUPS)): the greatest order of each group."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    tokens = groups[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    is_token = tokens < vocab
    orders = _orders(tl.load(logits_ptr + row * logits_row + tokens, mask=is_token, other=0.0))
    greatest = tl.max(tl.where(is_token, orders, _LEAST), 1)
    tl.store(greatest_ptr + row * num_groups + groups, greatest, mask=groups < num_groups)


@jit
def _best_of(logits, greatest, groups, vocab, GROUP: tl.constexpr):
    """The lowest token of the greatest order; -1 where a logit is not finite. greatest: of `groups`, 0, 1, ..."""
    most = tl.max(greatest, 0)
    group = tl.argmax(greatest, 0, tie_break_left=True)
    tokens = group * GROUP + tl.arange(0, GROUP)
    is_token = tokens < vocab
    is_best = is_token & (_orders(tl.load(logits + tokens, mask=is_token, other=0.0)) == most)
    best = tl.min(tl.where(is_best, tokens, _NOT_FINITE), 0)
    return most, tl.where(most == _NOT_FINITE, -1, best)


@jit
def _best_kernel(
    logits_ptr, greatest_ptr, out_ptr, logits_row, out_row, vocab, num_groups, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Grid (rows,): the best token of a row."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK)
    greatest = tl.load(greatest_ptr + row * num_groups + groups, mask=groups < num_groups, other=_LEAST)
    _, best = _best_of(logits_ptr + row * logits_row, greatest, groups, vocab, GROUP)
    tl.store(out_ptr + row * out_row, best)


@jit
def _kth(orders, k):
    """The k-th greatest of the orders, bit after bit."""
    found = tl.where(tl.sum((orders >= 0).to(tl.int32), 0) >= k, 0, _LEAST)
    for bit in range(31):
        raised = found + (1 << (30 - bit))
        found = tl.where(tl.sum((orders >= raised).to(tl.int32), 0) >= k, raised, found)
    return found


@jit(do_not_specialize=["top"])
def _candidates_kernel(
    logits_ptr, greatest_ptr, held_ptr, out_ptr, logits_row, out_row, vocab, num_groups, top,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Grid (rows,): the best token of a row, how many candidates it has, their ids, and the bits of their logits."""
    row = tl.program_id(0).to(tl.int64)
    logits, out, held = logits_ptr + row * logits_row, out_ptr + row * out_row, held_ptr + row * HELD
    groups = tl.arange(0, BLOCK)
    greatest = tl.load(greatest_ptr + row * num_groups + groups, mask=groups < num_groups, other=_LEAST)
    most, best = _best_of(logits, greatest, groups, vocab, GROUP)
    least = _kth(greatest, top)
    is_held = (greatest >= least) & (groups < num_groups)
    num_held = tl.sum(is_held.to(tl.int32), 0)
    place = tl.cumsum(is_held.to(tl.int32), 0) - 1
    tl.store(held + place, groups, mask=is_held & (place < HELD))
    tl.debug_barrier()  # other threads read what this one writes
    inside = tl.arange(0, HELD * GROUP)
    is_token = inside // GROUP < num_held
    tokens = tl.load(held + inside // GROUP, mask=is_token, other=0) * GROUP + inside % GROUP
    is_token = is_token & (tokens < vocab)
    x = tl.load(logits + tokens, mask=is_token, other=0.0)
    orders = tl.where(is_token, _orders(x), _LEAST)
    is_good = is_token & (orders >= least)
    count = tl.sum(is_good.to(tl.int32), 0)
    if count > ROOM:  # groups with several of them
        is_good = is_token & (orders >= _kth(orders, top))
        count = tl.sum(is_good.to(tl.int32), 0)
    is_taken = (most != _NOT_FINITE) & (num_held <= HELD) & (count <= ROOM)
    tl.store(out, best)
    tl.store(out + 1, tl.where(is_taken, count, -1))
    at = tl.cumsum(is_good.to(tl.int32), 0) - 1
    is_stored = is_good & is_taken
    tl.store(out + 2 + at, tokens, mask=is_stored)
    tl.store(out + 2 + ROOM + at, x.to(tl.int32, bitcast=True), mask=is_stored)


@dataclass(frozen=True, slots=True)
class BestTokens:
    """Memory for the best tokens of up to N rows, on their device. Every call writes to the same.

    greatest: int32 [N, G]; held: int32 [N, H], groups that have candidates; table: int32 [N, 2 + 2 R], of each row the
    best token, the number of candidates, room for their ids, and for the bits of their logits.
    """

    greatest: Tensor
    held: Tensor
    table: Tensor
    best: Tensor  # int32 [N, 1], apart from the table, so that little is copied where no more is wanted

    @classmethod
    def make(cls, num_rows: int, vocab: int, room: int, device: torch.device) -> BestTokens:
        """Allocate for rows of `vocab` logits on a device. room: a power of two. Raises ValueError for rows of more
        than MAX_VOCAB tokens.
        """
        if not 0 < vocab <= MAX_VOCAB:
            raise ValueError(f"rows must have 1 to {MAX_VOCAB} logits, got {vocab}")
        if room != power_of_two(room):
            raise ValueError(f"room must be a power of two, got {room}")

        def empty(width: int) -> Tensor:
            return torch.empty(num_rows, width, dtype=torch.int32, device=device)

        return cls(empty(-(-vocab // _GROUP)), empty(room), empty(2 + 2 * room), empty(1))

    @property
    def room(self) -> int:
        """Number R of candidates that a row of the table has room for, twice the largest `top`."""
        return (self.table.shape[1] - 2) // 2

    def find_best(self, logits: Tensor) -> Tensor:
        """Return the best token of each row of fp32 logits [n, V], int32 [n, 1], the lowest of equals; -1 where a logit
        is not finite. Valid until the next call, as all results.
        """
        rows = self._find_greatest(logits)
        if rows:
            _best_kernel[(rows,)](
                logits, self.greatest, self.best, logits.stride(0), self.best.stride(0), *self._sizes(logits),
                GROUP=_GROUP, BLOCK=power_of_two(self.greatest.shape[1]), num_warps=8,
            )  # fmt: skip
        return self.best[:rows]

    def find_candidates(self, logits: Tensor, top: int) -> Tensor:
        """Return the table's rows of logits fp32 [n, V], 1 <= top <= R / 2.

        Candidates are all tokens as good as the `top`-th, and maybe some more of the best, by ascending ids. Their
        number is -1 where a logit is not finite, and where they, or the groups in which they are looked for, are more
        than R.
        """
        if not 1 <= top <= self.room // 2:
            raise ValueError(f"top must be in [1, {self.room // 2}], got {top}")
        rows = self._find_greatest(logits)
        if rows:
            _candidates_kernel[(rows,)](
                logits, self.greatest, self.held, self.table, logits.stride(0), self.table.stride(0),
                *self._sizes(logits), min(top, logits.shape[1]),
                GROUP=_GROUP, BLOCK=power_of_two(self.greatest.shape[1]), HELD=self.room, ROOM=self.room,
                num_warps=8,
            )  # fmt: skip
        return self.table[:rows]

    def _sizes(self, logits: Tensor) -> tuple[int, int]:
        return logits.shape[1], self.greatest.shape[1]

    def _find_greatest(self, logits: Tensor) -> int:
        """Launches that, and returns how many rows there are."""
        rows, num_groups = len(logits), self.greatest.shape[1]
        if logits.dtype != torch.float32 or logits.dim() != 2 or (logits.shape[1] > 1 and logits.stride(1) != 1):
            raise TypeError(f"logits must be fp32 rows, got {logits.dtype} {list(logits.shape)}")
        if rows > len(self.greatest) or -(-logits.shape[1] // _GROUP) != num_groups:
            raise ValueError(f"logits {list(logits.shape)} do not fit memory for {list(self.greatest.shape)} groups")
        if rows:
            _greatest_kernel[(rows, -(-num_groups // _GROUPS))](
                logits, self.greatest, logits.stride(0), *self._sizes(logits),
                GROUP=_GROUP, GROUPS=_GROUPS,
            )  # fmt: skip
        return rows
