"""Counts how often each routed expert on a GPU was chosen, on that GPU: replayed steps count as others do.

What a step leaves is copied to the host behind it, so that whoever waits for its results has it without waiting again.
Knows ids of experts and which rows hold tokens; not routers, weights or steps.

L layers, E experts of a layer, K of them for each of T rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ktransformers.kernels.triton.experts.router import Chosen

__all__ = ["KEPT_ROWS", "ExpertUsage"]

KEPT_ROWS = 256
"""Rows of a step whose experts are kept until the next one, always; for steps of more rows see `keep`."""


class ExpertUsage:
    """Counter of routed experts chosen in the layers whose experts are on one device.

    A step's rows are distinguished from padding by their slots in the cache, which are negative there. counts: int64
    [L, E] on the host, since the start, as of the last `fetch` that is done.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        self._device, self._is_pinned = device, device.type == "cuda"
        with torch.inference_mode(False):
            self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
            self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, pin_memory=self._is_pinned)
        self._ids: dict[int, torch.Tensor] = {}  # int32 [L, KEPT_ROWS, K] by K
        self._large: dict[int, torch.Tensor] = {}  # the same of more rows, while they are kept
        self._large_rows = 0
        self._fetched: dict[int, torch.Tensor] = {}  # int32 [L, rows, K] by K, on the host
        self._ways: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}  # by K and rows, see _way
        self.layers: dict[int, int] = {}  # K of each layer that has chosen anything

    def chosen(self, layer: int, slots: torch.Tensor, top_k: int) -> Chosen:
        """Return the memory that the router of `layer` fills. slots: int64 [T], of the step's rows, on the device."""
        return Chosen(self._counts[layer], slots, self._memory(layer, len(slots), top_k))

    def note(self, layer: int, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """Count what a router chose that does not fill `chosen`'s memory: ids [T, K]; those out of range were
        skipped.
        """
        counts = self._counts[layer]
        is_there = (slots >= 0)[:, None] & (ids >= 0) & (ids < len(counts))
        counts.scatter_add_(0, ids.clamp(0, len(counts) - 1).long().flatten(), is_there.long().flatten())
        memory = self._memory(layer, *ids.shape)
        if memory is not None:
            memory.copy_(ids)

    def forget(self, layer: int, num_rows: int) -> None:
        """Clear the kept ids of `layer`: nothing of it runs here in a step of so many rows, though something did in
        others.
        """
        for known in (self._ids, self._large):
            memory = known.get(self.layers.get(layer, 0))
            if memory is not None and num_rows <= memory.shape[1]:
                memory[layer, :num_rows] = -1

    def keep(self, num_rows: int) -> None:
        """Keep the experts of steps of up to so many rows, from now on; 0: of KEPT_ROWS."""
        self._large_rows = num_rows
        self._large.clear()
        self._ways.clear()

    def _memory(self, layer: int, num_rows: int, top_k: int) -> torch.Tensor | None:
        """For the ids of a step that is kept, int32 [T, K]."""
        self.layers[layer] = top_k
        if num_rows <= KEPT_ROWS:
            return self._made(self._ids, KEPT_ROWS, top_k)[layer, :num_rows]
        if num_rows <= self._large_rows:
            return self._made(self._large, self._large_rows, top_k)[layer, :num_rows]
        return None

    def _made(self, known: dict[int, torch.Tensor], num_rows: int, top_k: int) -> torch.Tensor:
        if top_k not in known:
            shape = len(self._counts), num_rows, top_k
            with torch.inference_mode(False):
                known[top_k] = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return known[top_k]

    def fetch(self, num_rows: int = 0, rows: Sequence[int] | None = None) -> None:
        """Enqueue a copy of the counts of the step that was launched last, in the order of its stream.

        rows: of its num_rows, those whose ids `ids` is to have; None: counts alone.
        """
        self.counts.copy_(self._counts, non_blocking=True)
        self._fetched = {}
        if rows is None or num_rows > max(KEPT_ROWS, self._large_rows):
            return
        for top_k, kept in (self._ids if num_rows <= KEPT_ROWS else self._large).items():
            if num_rows <= KEPT_ROWS and len(rows) == num_rows:
                between, host = self._way(top_k, num_rows)
                self._fetched[top_k] = host.copy_(between.copy_(kept[:, :num_rows]), non_blocking=True)
                continue
            found = kept[:, :num_rows]
            if len(rows) < num_rows:
                found = found[:, torch.tensor(rows, dtype=torch.int64, device=self._device)]
            host = torch.empty(found.shape, dtype=torch.int32, pin_memory=self._is_pinned)
            self._fetched[top_k] = host.copy_(found, non_blocking=True)

    def _way(self, top_k: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the ids of small steps, int32 [L, rows, K] on the device and on the host: made once, as pinning
        takes longer than the copy."""
        key = top_k, num_rows
        if key not in self._ways:
            shape = len(self._counts), num_rows, top_k
            with torch.inference_mode(False):
                between = torch.empty(shape, dtype=torch.int32, device=self._device)
                self._ways[key] = between, torch.empty(shape, dtype=torch.int32, pin_memory=self._is_pinned)
        return self._ways[key]

    def ids(self) -> dict[int, torch.Tensor]:
        """Return the ids of the last `fetch` by K, int32 [L, rows, K], on the host; valid until the next one."""
        return self._fetched
