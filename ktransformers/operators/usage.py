"""How often each routed expert on a GPU was chosen, counted there: nobody waits, and replayed steps count as others do.

Knows ids of experts and which rows hold tokens; not routers, weights or steps.

L layers, E experts of a layer, K of them for each of T rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.kernels.triton.router import Chosen

__all__ = ["KEPT_ROWS", "ExpertUsage"]

KEPT_ROWS = 256
"""Rows of a step whose experts are kept until the next one."""


class ExpertUsage:
    """Of the layers whose experts are on one device.

    A step's rows are told apart from padding by their slots in the cache, which are negative there.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device):
        with torch.inference_mode(False):
            self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self._ids: dict[int, torch.Tensor] = {}  # int32 [L, KEPT_ROWS, K] by K
        self._top_k: dict[int, int] = {}  # by layer

    def chosen(self, layer: int, slots: torch.Tensor, top_k: int) -> Chosen:
        """What the router of `layer` fills. slots: int64 [T], of the step's rows, on the device."""
        return Chosen(self._counts[layer], slots, self._memory(layer, len(slots), top_k))

    def note(self, layer: int, slots: torch.Tensor, ids: torch.Tensor) -> None:
        """The same for a router that fills nothing: ids [T, K]; those out of range were skipped."""
        counts = self._counts[layer]
        is_there = (slots >= 0)[:, None] & (ids >= 0) & (ids < len(counts))
        counts.scatter_add_(0, ids.clamp(0, len(counts) - 1).long().flatten(), is_there.long().flatten())
        memory = self._memory(layer, *ids.shape)
        if memory is not None:
            memory.copy_(ids)

    def _memory(self, layer: int, num_rows: int, top_k: int) -> torch.Tensor | None:
        """For the ids of a step that is kept, int32 [T, K]."""
        if top_k not in self._ids:
            shape = len(self._counts), KEPT_ROWS, top_k
            with torch.inference_mode(False):
                self._ids[top_k] = torch.zeros(shape, dtype=torch.int32, device=self._counts.device)
        self._top_k[layer] = top_k
        return self._ids[top_k][layer, :num_rows] if num_rows <= KEPT_ROWS else None

    def counts(self) -> npt.NDArray[np.int64]:
        """[L, E] since the start. Waits for what the device was given before."""
        taken: npt.NDArray[np.int64] = self._counts.to("cpu", copy=True).numpy()
        return taken

    def ids(self, num_rows: int) -> Mapping[int, npt.NDArray[np.int32]]:
        """[T, K] of each layer in the last step, which had num_rows <= KEPT_ROWS. Waits likewise."""
        kept = {top_k: ids[:, :num_rows].to("cpu", copy=True).numpy() for top_k, ids in self._ids.items()}
        return {layer: kept[top_k][layer] for layer, top_k in sorted(self._top_k.items())}
