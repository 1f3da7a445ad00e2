"""Chooses the sequences of a prefill step that attend on expanded keys, and the order in which their positions are
expanded.

Latent attention (mla.py beside this file) can be computed in two ways. Per head, n rows that see up to L positions take

    pairs = n L - n (n - 1) / 2
    absorbed:  pairs (2 R + P)     and per row       R (N + V)   the query's and the result's projections
    expanded:  pairs (N + P + V)   and per position  R (N + V)   keys and values of all L positions

products, R being kv_lora_rank, P the rotary, N the other columns of a key and V those of a value: 1088 against 320 a
pair for DeepSeek-V2 and V3, and 131,072 a row or position. Expanding pays when rows share it: never in a decode step,
and for a long context from about 170 rows on by products alone (n L (1088 - 320) = 131,072 L). `Rates` turns products
into time, since kernels differ. Sequences are looked at one by one, by their rows and positions alone: in a step of
balance_serve the rows of decoding sequences, and short chunks, stay absorbed, while long chunks are expanded.

Pure but for `StepRuns`, which puts what a step needs on its device, once for all layers. Knows contexts and shapes;
neither weights nor the kernel's insides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from ktransformers.core import Phase
from ktransformers.kernels.triton.attention.materialized import (
    MaterializedRun,
    MaterializedTile,
    materialized_tile,
    tiles_of,
)
from ktransformers.operators.context import ForwardContext

__all__ = [
    "EXPANSION_NBYTES",
    "WORKSPACE_ALIGN",
    "LatentDims",
    "Materialization",
    "MaterializationPolicy",
    "MaterializedBatch",
    "Rates",
    "StepRuns",
    "batches_of",
    "is_worth_materializing",
]

EXPANSION_NBYTES = 256 << 20
"""Bytes of a device for gathered latents and expanded keys and values; one layer after another uses them."""

WORKSPACE_ALIGN = 128
"""Values at a multiple of which each part of the workspace begins."""


@dataclass(frozen=True, slots=True)
class Rates:
    """TFLOP/s of the kernels on an H100; only their ratios matter, so that they serve for other devices.

    absorbed, expanded: attention. dense: projections of rows. materialization: of positions, which also writes the
    results. launch_us: what expanding a sequence costs however short it is. `benchmarks.gpu.latent` measures them.
    """

    absorbed: float = 218.0
    expanded: float = 430.0
    dense: float = 600.0
    materialization: float = 400.0
    launch_us: float = 30.0

    def with_flashinfer(self) -> Rates:
        """Return these rates with the absorbed form by FlashInfer."""
        return replace(self, absorbed=600.0)


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Sizes of latent attention; letters as in the module."""

    num_heads: int
    rank: int
    nope: int
    rope: int
    v_dim: int

    def head_numel(self) -> int:
        """Return the number of values that a position takes in the workspace for each head."""
        return self.nope + self.v_dim

    def heads_at_once(self, num_positions: int, room: int) -> int:
        """Return how many heads' keys and values fit `room` values beside the gathered latents of so many positions.

        0 when not even one does; at most all, and no more than are needed for as few turns.
        """
        left = room - num_positions * (self.rank + self.rope) - 3 * WORKSPACE_ALIGN
        fitting = min(self.num_heads, left // (num_positions * self.head_numel()))
        if fitting < 1:
            return 0
        turns = -(-self.num_heads // fitting)
        return -(-self.num_heads // turns)


def is_worth_materializing(dims: LatentDims, num_rows: int, length: int, rates: Rates) -> bool:
    """Whether num_rows rows at the end of a sequence of `length` positions take less time on expanded keys."""
    heads, pairs = dims.num_heads, num_rows * length - num_rows * (num_rows - 1) // 2
    projection = dims.rank * dims.head_numel()
    absorbed = pairs * (2 * dims.rank + dims.rope) / rates.absorbed + num_rows * projection / rates.dense
    expanded = pairs * (dims.head_numel() + dims.rope) / rates.expanded + length * projection / rates.materialization
    return 2e-6 * heads * (absorbed - expanded) > rates.launch_us


@dataclass(frozen=True, slots=True)
class MaterializationPolicy:
    """How a layer chooses the sequences that are expanded. is_forced: all sequences with more than one row, if they
    fit. nbytes: of the workspace.
    """

    dims: LatentDims
    dtype: torch.dtype
    rates: Rates
    is_forced: bool = False
    nbytes: int = EXPANSION_NBYTES

    @property
    def room(self) -> int:
        return self.nbytes // self.dtype.itemsize

    def materializes(self, num_rows: int, length: int) -> bool:
        """Whether so many rows of a sequence are to attend on expanded keys."""
        if num_rows < 2 or not self.dims.heads_at_once(length, self.room):
            return False
        return self.is_forced or is_worth_materializing(self.dims, num_rows, length, self.rates)

    def least_rows(self, length: int) -> int | None:
        """Return the number of rows from which on a sequence of `length` positions is expanded; None: never."""
        return next((rows for rows in range(2, length + 1) if self.materializes(rows, length)), None)


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring rows of a step that are neighbours in a sequence: its last positions, up to `length`."""

    seq: int
    first_row: int
    num_rows: int
    length: int


@dataclass(frozen=True, slots=True)
class MaterializedBatch:
    """Sequences that are expanded side by side, `num_heads` heads at a time.

    slots: cache slots of their positions, int64 on the device, or a slice where they follow one another. tiles: see
    `kernels.triton.attention.materialized.tiles_of`, on the device.
    """

    num_positions: int
    num_heads: int
    slots: torch.Tensor | slice
    tiles: torch.Tensor
    tile: MaterializedTile


@dataclass(frozen=True, slots=True)
class Materialization:
    """Expansion of a step: all its sequences but `rest`: rows, a slice or int64 on the device, that stay absorbed."""

    batches: tuple[MaterializedBatch, ...]
    rest: slice | torch.Tensor | None


def batches_of(lengths: Iterable[int], dims: LatentDims, room: int) -> list[list[int]]:
    """Divide sequences, by their numbers, into those expanded together: as many as fit with all heads, or one alone."""
    batches: list[list[int]] = []
    total = 0
    for number, length in enumerate(lengths):
        if batches and dims.heads_at_once(total + length, room) == dims.num_heads:
            batches[-1].append(number)
            total += length
        else:
            batches.append([number])
            total = length
    return batches


class StepRuns:
    """The sequences of one step, and what was chosen for it: layers that choose alike share it."""

    def __init__(self, context: ForwardContext):
        """context: with tensors on the CPU."""
        self._table, self._page_size = context.block_table, context.page_size
        self.num_rows = len(context.seq_ids)
        self.runs = _runs_of(context.seq_ids, context.kv_lens)
        self._made: dict[tuple[MaterializationPolicy, torch.device], Materialization | None] = {}

    @staticmethod
    def materialization_of(
        context: ForwardContext, choice: MaterializationPolicy, device: torch.device
    ) -> Materialization | None:
        """Return what is expanded in the step of `context`, as the model was given it; None: nothing.

        Steps that CUDA graphs replay have contexts with nothing on the CPU: they are chosen where nothing is expanded.
        """
        if context.phase is not Phase.PREFILL or context.is_replayable:
            return None
        return context.derived("runs", context.block_table, lambda _: StepRuns(context)).materialization(choice, device)

    @staticmethod
    def is_materialized(context: ForwardContext, choices: Iterable[MaterializationPolicy]) -> bool:
        """Whether some sequence of a step is expanded by one of `choices`. context: with tensors on the CPU."""
        runs = _runs_of(context.seq_ids, context.kv_lens)
        return any(choice.materializes(run.num_rows, run.length) for choice in choices for run in runs)

    def materialization(self, choice: MaterializationPolicy, device: torch.device) -> Materialization | None:
        """Return what is expanded by `choice`; None: nothing."""
        key = (choice, device)
        if key not in self._made:
            self._made[key] = self._make(choice, device)
        return self._made[key]

    def _make(self, choice: MaterializationPolicy, device: torch.device) -> Materialization | None:
        chosen = [run for run in self.runs if choice.materializes(run.num_rows, run.length)]
        if not chosen:
            return None
        numbers = batches_of([run.length for run in chosen], choice.dims, choice.room)
        batches = tuple(self._batch([chosen[i] for i in group], choice, device) for group in numbers)
        return Materialization(batches, self._rest(chosen, device))

    def _batch(self, runs: list[_Run], choice: MaterializationPolicy, device: torch.device) -> MaterializedBatch:
        num_positions, num_rows = sum(run.length for run in runs), sum(run.num_rows for run in runs)
        num_heads = choice.dims.heads_at_once(num_positions, choice.room)
        tile = materialized_tile(num_rows, num_heads, choice.dtype, device)
        placed, offset = [], 0
        for run in runs:
            placed.append(MaterializedRun(run.first_row, run.num_rows, offset, run.length))
            offset += run.length
        slots = torch.cat([self._slots(run) for run in runs])
        first = int(slots[0])
        is_plain = bool((slots == torch.arange(first, first + num_positions)).all())
        return MaterializedBatch(
            num_positions,
            num_heads,
            slice(first, first + num_positions) if is_plain else slots.to(device),
            tiles_of(placed, tile.block_m).to(device),
            tile,
        )

    def _slots(self, run: _Run) -> torch.Tensor:
        positions = torch.arange(run.length)
        return self._table[run.seq, positions // self._page_size].long() * self._page_size + positions % self._page_size

    def _rest(self, chosen: list[_Run], device: torch.device) -> slice | torch.Tensor | None:
        """The rows that are in none of `chosen`."""
        is_left = torch.ones(self.num_rows, dtype=torch.bool)
        for run in chosen:
            is_left[run.first_row : run.first_row + run.num_rows] = False
        rows = is_left.nonzero()[:, 0]
        if not len(rows):
            return None
        first, last = int(rows[0]), int(rows[-1])
        return slice(first, last + 1) if last - first + 1 == len(rows) else rows.to(device)


def _runs_of(seq_ids: torch.Tensor, kv_lens: torch.Tensor) -> tuple[_Run, ...]:
    """The runs of a step with at least one row; rows that attend to nothing are runs of their own."""
    is_break = (seq_ids.diff() != 0) | (kv_lens.diff() != 1) | (kv_lens[:-1] < 1)
    ends = [*(is_break.nonzero()[:, 0] + 1).tolist(), len(seq_ids)]
    starts = [0, *ends[:-1]]
    seqs, lens = seq_ids.tolist(), kv_lens.tolist()
    return tuple(_Run(seqs[start], start, end - start, lens[end - 1]) for start, end in zip(starts, ends, strict=True))
