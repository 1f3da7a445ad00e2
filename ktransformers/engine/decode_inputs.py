"""What a decode step reads, and the same padded to a graph's size at one place of memory.

B rows of a graph, T <= B of them with tokens, S sequences, P pages of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ktransformers.kernels.types import StateStep

__all__ = ["DecodeInputs", "StaticInputs", "decode_batch_sizes"]


def decode_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """1, 2, 4, 8, ... and max_batch_size itself."""
    sizes = [1]
    while sizes[-1] < max_batch_size:
        sizes.append(min(2 * sizes[-1], max_batch_size))
    return tuple(sizes)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """What a decode step reads; see operators.context for the meaning. All on one device, hidden_states on any."""

    hidden_states: Tensor  # [T, H], what the embedding gave
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    seq_ids: Tensor  # int32 [T]
    kv_lens: Tensor  # int32 [T]
    block_table: Tensor  # int32 [S, P]
    states: StateStep | None = None
    token_ids: Tensor | None = None  # int64 [T]; None for a step of a model whose layers look nothing up

    @property
    def num_rows(self) -> int:
        return int(self.hidden_states.shape[0])

    def to(self, device: torch.device) -> DecodeInputs:
        """A copy there, or itself."""
        kv_lens = self.kv_lens.to(device)
        return DecodeInputs(
            self.hidden_states.to(device),
            self.positions.to(device),
            self.slot_mapping.to(device),
            self.seq_ids.to(device),
            kv_lens,
            self.block_table.to(device),
            None if self.states is None else self.states.to(device, kv_lens),
            None if self.token_ids is None else self.token_ids.to(device),
        )


@dataclass(frozen=True, slots=True)
class _Extent:
    """How much a graph reads: of so many rows, pages of a block table and columns, with states or without."""

    rows: int
    pages: int
    width: int
    dtype: torch.dtype
    has_states: bool

    @property
    def fields(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Elements of each type: hidden states, then numbers of either size."""
        num_words = self.rows * (2 + self.pages) + self.has_states * (4 * self.rows + 1)
        return (self.rows * self.width, self.dtype), (3 * self.rows, torch.int64), (num_words, torch.int32)

    @property
    def nbytes(self) -> int:
        return sum(_aligned(numel * kind.itemsize) for numel, kind in self.fields)

    def views(self, data: Tensor) -> DecodeInputs:
        """The fields in `data`, bytes, each of them aligned."""
        parts, at, rows = [], 0, self.rows
        for numel, kind in self.fields:
            parts.append(data[at : at + numel * kind.itemsize].view(kind))
            at += _aligned(numel * kind.itemsize)
        hidden, wide, words = parts
        sizes = [rows, rows, rows * self.pages, self.has_states * (4 * rows + 1)]
        seq_ids, kv_lens, table, rest = torch.split(words, sizes)
        states = None
        if self.has_states:
            first_rows, read, write, saves = torch.split(rest, [rows + 1, rows, rows, rows])
            states = StateStep(first_rows, read, write, saves, kv_lens)
        return DecodeInputs(
            hidden.view(rows, self.width),
            wide[:rows],
            wide[rows : 2 * rows],
            seq_ids,
            kv_lens,
            table.view(rows, self.pages),
            states,
            wide[2 * rows :],
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class StaticInputs:
    """The inputs of a graph of B rows: where they lie on the device, and pinned memory from which one copy fills them.

    A row without a token writes no key (slot -1) and attends to nothing (length 0, for which attention gives zeros), so
    that padding needs no page of its own and costs attention nothing; it belongs to no sequence, and a sequence without
    rows has no state. width, dtype: of hidden states. has_states: whether layers are recurrent.
    """

    def __init__(
        self,
        batch_size: int,
        num_pages: int,
        device: torch.device,
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        has_states: bool = False,
    ) -> None:
        extent = _Extent(batch_size, num_pages, width, dtype, has_states)
        nbytes = extent.nbytes
        self.batch_size, self.num_pages, self.device = batch_size, num_pages, device
        self._data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        self._staged = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.inputs, self._host = extent.views(self._data), extent.views(self._staged)
        self.pad()

    def pad(self) -> None:
        """Fill with rows that hold no token."""
        self._staged.zero_()
        self._host.slot_mapping.fill_(-1)
        if self._host.states is not None:
            _fill_states(self._host.states, None)
        self._data.copy_(self._staged, non_blocking=True)

    def fill(self, source: DecodeInputs) -> None:
        """Take `source`, on the CPU, and pad it. Nothing may still read what was filled in before.

        Its hidden states may be on the device already.
        """
        rows, (seqs, pages) = source.num_rows, source.block_table.shape
        host = self._host
        self._staged.zero_()
        is_there = source.hidden_states.device == self.device
        if not is_there:
            host.hidden_states[:rows] = source.hidden_states
        host.positions[:rows] = source.positions
        if host.token_ids is not None and source.token_ids is not None:
            host.token_ids[:rows] = source.token_ids
        host.slot_mapping[:rows] = source.slot_mapping
        host.slot_mapping[rows:] = -1
        host.seq_ids[:rows] = source.seq_ids
        host.kv_lens[:rows] = source.kv_lens
        host.block_table[:seqs, :pages] = source.block_table
        if host.states is not None:
            _fill_states(host.states, source.states)
        self._data.copy_(self._staged, non_blocking=True)
        if is_there:
            self.inputs.hidden_states[:rows] = source.hidden_states


def _fill_states(host: StateStep, source: StateStep | None) -> None:
    """Take `source` and pad it: with sequences that have no rows, and keep no state."""
    for slots in (host.read_slots, host.write_slots, host.save_slots):
        slots.fill_(-1)
    host.first_rows.zero_()
    if source is not None:
        seqs = source.num_seqs
        host.first_rows[: seqs + 1] = source.first_rows
        host.first_rows[seqs + 1 :] = source.first_rows[-1]
        host.read_slots[:seqs] = source.read_slots
        host.write_slots[:seqs] = source.write_slots
        host.save_slots[: len(source.save_slots)] = source.save_slots
