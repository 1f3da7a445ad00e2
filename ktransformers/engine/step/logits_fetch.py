"""Brings a step's logits from a GPU to the CPU, or only what choosing tokens takes of them. Knows no requests.

Work is launched behind the step's, and waited for once; a second time for a row whose best tokens do not tell enough,
on a stream of its own: the step's may hold the next one meanwhile, which nobody may wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ktransformers.engine.sampling.logits_request import (
    BEST_TOKEN,
    MAX_CANDIDATES,
    WHOLE_ROW,
    RequestedLogits,
    StepLogits,
)
from ktransformers.kernels.triton.common.candidates import MAX_VOCAB, BestTokens
from ktransformers.operators.device import use

__all__ = ["LogitsFetch"]


class LogitsFetch:
    """Copies logits, at most fp32 [N, V] on `device`, to the CPU. What is fetched is valid until the next fetch.

    spins: the thread that waits keeps its core; else it sleeps, and is late when it wakes up.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, spins: bool = False) -> None:
        self._num_rows, self._vocab_size, self._device = num_rows, vocab_size, device
        self._tools = BestTokens.make(num_rows, vocab_size, MAX_CANDIDATES, device) if vocab_size <= MAX_VOCAB else None
        self._best, self._table = self._empty(1, torch.int32), self._empty(2 + 2 * MAX_CANDIDATES, torch.int32)
        self._whole: Tensor | None = None  # large, and often not needed
        self._cuda: Any = torch.cuda  # parts of it have no types
        is_cuda = device.type == "cuda"
        self._done = self._cuda.Event(blocking=not spins) if is_cuda else None
        self._late = self._cuda.Stream(device) if is_cuda else None

    def _empty(self, width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(self._num_rows, width, dtype=dtype, pin_memory=self._device.type == "cuda")

    def _wait(self, meanwhile: Callable[[], None]) -> None:
        if self._done is not None:
            self._done.record(self._cuda.current_stream(self._device))
        meanwhile()
        if self._done is not None:
            self._done.synchronize()

    def whole(self, logits: Tensor, meanwhile: Callable[[], None] = lambda: None) -> Tensor:
        """Copy whole rows, fp32 [n, V], to the CPU. meanwhile: called before they are waited for."""
        if self._done is None:
            meanwhile()
            return logits.to("cpu")
        host = self._host(0, len(logits))
        host.copy_(logits, non_blocking=True)
        self._wait(meanwhile)
        return host

    def _host(self, first: int, count: int) -> Tensor:
        """Rows on the CPU."""
        if self._whole is None:
            self._whole = self._empty(self._vocab_size, torch.float32)
        return self._whole[first : first + count]

    def requested(
        self, logits: Tensor, requests: Sequence[int], meanwhile: Callable[[], None] = lambda: None
    ) -> StepLogits:
        """Copy what is needed of each row of fp32 [n, V] to the CPU; all of them where no need is less than a row.

        meanwhile: called before it is waited for.
        """
        places = [-1] * len(requests)
        whole = [row for row, need in enumerate(requests) if need == WHOLE_ROW]
        if self._tools is None or len(whole) == len(requests):
            return self.whole(logits, meanwhile)
        use(self._device)
        top = max(requests)
        if top > 0:
            table = self._table[: len(requests)].copy_(self._tools.find_candidates(logits, top), non_blocking=True)
        else:
            table = self._best[: len(requests)].copy_(self._tools.find_best(logits), non_blocking=True)
        self._take(logits, whole, places, 0)
        self._wait(meanwhile)
        missing = _unknown(table, requests)
        if missing:
            if self._whole is None:  # not pinned: making such memory waits for the GPU, and so for a step that is held
                self._whole = torch.empty(self._num_rows, self._vocab_size)
            with self._cuda.stream(self._late):
                self._take(logits, missing, places, len(whole))
                self._wait(lambda: None)
        count = len(whole) + len(missing)
        rows = self._host(0, count) if count else torch.empty(0, self._vocab_size)
        return RequestedLogits(tuple(requests), rows, places, table)

    def _take(self, logits: Tensor, rows: Sequence[int], places: list[int], first: int) -> None:
        """Copy whole rows to those from `first` on."""
        if rows:
            for place, (row, host) in enumerate(zip(rows, self._host(first, len(rows)), strict=True), start=first):
                host.copy_(logits[row], non_blocking=True)
                places[row] = place


def _unknown(table: Tensor, needs: Sequence[int]) -> list[int]:
    """Rows of which the table does not tell enough.

    A logit is not finite, which whoever chooses is to say; or more tokens than there is room for are equally good; or
    nothing was computed, in a warm-up.
    """
    best = table[:, 0].tolist()
    counts = table[:, 1].tolist() if table.shape[1] > 1 else best
    return [
        row
        for row, need in enumerate(needs)
        if (need == BEST_TOKEN and best[row] < 0) or (need > 0 and counts[row] < 1)
    ]
