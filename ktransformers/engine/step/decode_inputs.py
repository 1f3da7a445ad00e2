"""The inputs of a step, and the same padded to a graph's size at one place of memory.

B rows of a graph, T <= B of them with tokens, S sequences, N of their rows whose logits are kept, P pages of a block
table.

    kind      rows of a sequence   logits kept          sizes
    decode    one                  all                  decode_batch_sizes
    draft     1 + draft tokens     all                  draft_sizes
    other     any, of prompts      one of a sequence    mixed_sizes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ktransformers.engine.step.broadcast import StepBlocks
from ktransformers.kernels.types import StateStep
from ktransformers.operators.context import PictureRows

__all__ = [
    "SHARED_ROWS",
    "DecodeInputs",
    "InputMemory",
    "StaticInputs",
    "StepSize",
    "decode_batch_sizes",
    "draft_sizes",
    "mixed_sizes",
    "shared_nbytes",
]

_FEW_ROWS = 16
"""Up to so many rows attention reads each row's positions apart, whoever they belong to."""

_ONE_THREAD = 32767
"""Elements up to which torch copies on one thread: to wake others takes longer than to copy the rows of a step."""

SHARED_ROWS = 64
"""Rows of the largest graph whose inputs are shared: to send a step in a message takes longer, which counts less the
longer a step is, and memory that is shared is pinned."""


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """The size of a graph: how many rows it takes, of how many sequences at most, and of how many rows logits are kept:
    of as many as there are sequences where `kept` is not given.

    axes: of rotary positions, 1, or 3 where rows may show pictures that are turned to time, height and width. layers:
    those behind which pictures add something (deepstack), -1: in front of the first.
    """

    rows: int
    seqs: int
    kept: int = 0
    axes: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "kept", self.kept or self.seqs)

    @property
    def is_plain(self) -> bool:
        """Whether rows bring hidden states alone, with one rotary position each."""
        return self.axes == 1 and not self.layers

    @property
    def is_decode(self) -> bool:
        """Whether each row has a sequence of its own."""
        return self.rows == self.seqs

    @property
    def is_draft(self) -> bool:
        """Whether all logits are kept, of rows of which several may be one sequence's."""
        return self.kept == self.rows > self.seqs

    @property
    def kind(self) -> str:
        """The kind of steps that it is for, see the module's docstring."""
        return "decode" if self.is_decode else "draft" if self.is_draft else "other"

    def waste(self, rows: int, seqs: int, kept: int) -> tuple[bool, int, int, int]:
        """A sort key, less for a graph that suits a step better. Where each row may have a sequence of its own,
        attention reads the positions of many rows of one sequence anew for each of them; where draft tokens are
        expected, states of recurrent layers are carried row by row, which takes long for a prompt."""
        is_unsuited = rows > seqs if self.is_decode else self.is_draft and kept < rows
        return is_unsuited and self.rows > _FEW_ROWS, self.rows, self.seqs, self.kept

    def __str__(self) -> str:
        if self.is_decode:
            return str(self.rows)
        kind = "drafted " if self.is_draft else "" if self.is_plain else "shown "
        return f"{self.rows} {kind}rows of {self.seqs}"


def decode_batch_sizes(max_batch_size: int) -> tuple[int, ...]:
    """Batch sizes of decode graphs: 1, 2, 4, 8, ... and max_batch_size itself."""
    sizes = [1]
    while sizes[-1] < max_batch_size:
        sizes.append(min(2 * sizes[-1], max_batch_size))
    return tuple(sizes)


def mixed_sizes(rows: Sequence[int], most_rows: int, max_batch_size: int) -> tuple[StepSize, ...]:
    """Choose the sizes of steps of several rows a sequence: of `rows`, as far as steps of most_rows rows need them.

    Of more than a few rows at most half have sequences of their own, so that attention takes them for what they are.
    """
    found = set[StepSize]()
    for count in rows:
        size = min(count, most_rows)
        seqs = min(max_batch_size, size if size <= _FEW_ROWS else size // 2)
        found.add(StepSize(size, seqs))
    return tuple(sorted(size for size in found if not size.is_decode))


def draft_sizes(rows: Sequence[int], max_drafts: int, most_rows: int, max_batch_size: int) -> tuple[StepSize, ...]:
    """Choose the sizes of steps with up to max_drafts draft tokens behind each token: of `rows`, as far as steps of
    most_rows rows need them.

    Steps of no more rows than there may be sequences take the graphs of decode steps, which keep as many logits.
    """
    most = min(max_batch_size * (1 + max_drafts), most_rows, max(rows, default=0))
    counts = {count for count in (*rows, most) if max_batch_size < count <= most}
    return tuple(StepSize(count, max_batch_size, count) for count in sorted(counts))


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """The inputs of a step; see operators.context for their meaning. All on one device, hidden_states on any.

    keep: rows whose logits are wanted; None: all, in their order.
    """

    hidden_states: Tensor  # [T, H], what the embedding gave
    positions: Tensor  # int64 [T], or [3, T] of three axes
    slot_mapping: Tensor  # int64 [T]
    seq_ids: Tensor  # int32 [T]
    kv_lens: Tensor  # int32 [T]
    block_table: Tensor  # int32 [S, P]
    states: StateStep | None = None
    token_ids: Tensor | None = None  # int64 [T]; None for a step of a model whose layers look nothing up
    keep: Tensor | None = None  # int64 [N]
    pictures: PictureRows | None = None  # whose hidden states are in hidden_states already

    @property
    def axes(self) -> int:
        """Axes of rotary positions, see StepSize."""
        return 1 if self.positions.dim() == 1 else len(self.positions)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers behind which pictures add something, see StepSize."""
        return () if self.pictures is None else tuple(self.pictures.by_layer)

    @property
    def num_rows(self) -> int:
        return int(self.hidden_states.shape[0])

    @property
    def num_kept(self) -> int:
        """Number N of rows whose logits are kept."""
        return self.num_rows if self.keep is None else len(self.keep)

    def to(self, device: torch.device) -> DecodeInputs:
        """Return the inputs on `device`: a copy, or themselves."""
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
            None if self.keep is None else self.keep.to(device),
            None if self.pictures is None else self.pictures.to(device),
        )


@dataclass(frozen=True, slots=True)
class _Extent:
    """How much a graph reads: rows of sequences, pages of a block table and columns, with states or without."""

    size: StepSize
    pages: int
    width: int
    dtype: torch.dtype
    has_states: bool

    @property
    def words(self) -> tuple[int, ...]:
        """Numbers of 4 bytes: sequences and lengths of rows, the block table; bounds, slots that are read and written
        and saved to."""
        rows, seqs, on = self.size.rows, self.size.seqs, int(self.has_states)
        return rows, rows, seqs * self.pages, on * (seqs + 1), on * seqs, on * seqs, on * rows

    @property
    def fields(self) -> tuple[tuple[int, torch.dtype], ...]:
        """Elements of each type: hidden states, then numbers of either size."""
        rows = self.size.rows
        wide = (2 + self.size.axes) * rows + self.size.kept
        return (rows * self.width, self.dtype), (wide, torch.int64), (sum(self.words), torch.int32)

    @property
    def nbytes(self) -> int:
        return sum(_aligned(numel * kind.itemsize) for numel, kind in self.fields)

    def views(self, data: Tensor) -> DecodeInputs:
        """The fields in `data`, bytes, each of them aligned."""
        parts, at, rows = [], 0, self.size.rows
        for numel, kind in self.fields:
            parts.append(data[at : at + numel * kind.itemsize].view(kind))
            at += _aligned(numel * kind.itemsize)
        hidden, wide, words = parts
        positions, slots, token_ids, keep = torch.split(wide, [self.size.axes * rows, rows, rows, self.size.kept])
        seq_ids, kv_lens, table, *state_slots = torch.split(words, list(self.words))
        states = None
        if self.has_states:
            first_rows, read, write, saves = state_slots
            # Sequences of few and of many rows are told apart on the device where there may be either.
            most = rows if self.size.kind == "other" else None
            states = StateStep(first_rows, read, write, saves, kv_lens, most)
        return DecodeInputs(
            hidden.view(rows, self.width),
            positions if self.size.axes == 1 else positions.view(self.size.axes, rows),
            slots,
            seq_ids,
            kv_lens,
            table.view(self.size.seqs, self.pages),
            states,
            token_ids,
            keep,
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


class InputMemory:
    """The memory in which the inputs of graphs lie, one graph's at a time: bytes on a device, and those that are copied
    there. The latter are there twice, in turns: a step's may be written while those of the step before it are read.

    blocks: memory of the CPU that the processes of a model share; shared_nbytes: of its largest step. turn: which of
    the two was written last.
    """

    def __init__(self, device: torch.device, blocks: StepBlocks | None = None, shared_nbytes: int = 0) -> None:
        self.device, self.blocks, self.turn = device, blocks, 0
        self.shared: Sequence[Tensor] = () if blocks is None else blocks.slots(shared_nbytes)
        self._data = torch.empty(0, dtype=torch.uint8)
        self._staged = (self._data, self._data)

    def take(self, nbytes: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the first bytes of all; of other memory than what was taken before where that does not do."""
        if len(self._data) < nbytes:
            self._data = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            self._staged = self._pinned(nbytes), self._pinned(nbytes)
        first, second = self._staged
        return self._data[:nbytes], (first[:nbytes], second[:nbytes])

    def _pinned(self, nbytes: int) -> Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")


class _HostInputs:
    """The inputs of a graph in memory of the CPU, as arrays: with cold caches these take a fifth less time to write
    than tensors."""

    def __init__(self, extent: _Extent, data: Tensor) -> None:
        self.data, views = data, extent.views(data)
        self._hidden = views.hidden_states
        self._at_once = max(1, _ONE_THREAD // self._hidden.shape[1])  # rows
        nbytes = views.hidden_states.nbytes
        self._hidden_bytes = data[:nbytes].numpy().reshape(len(self._hidden), -1)
        self._numbers = data[_aligned(nbytes) :].numpy()
        assert views.token_ids is not None, "extents have all fields"
        assert views.keep is not None, "extents have all fields"
        self._positions, self._slot_mapping = views.positions.numpy(), views.slot_mapping.numpy()
        self._token_ids, self._keep = views.token_ids.numpy(), views.keep.numpy()
        self._seq_ids, self._kv_lens = views.seq_ids.numpy(), views.kv_lens.numpy()
        self._block_table = views.block_table.numpy()
        self._states = None if views.states is None else _HostStates(views.states)

    def pad(self) -> None:
        """Write rows that hold no token."""
        self._clear(0)

    def _clear(self, rows: int) -> None:
        """Pad behind so many rows of hidden states."""
        self._hidden_bytes[rows:] = 0
        self._numbers[:] = 0
        self._slot_mapping[rows:] = -1
        if self._states is not None:
            self._states.clear()

    def write(self, source: DecodeInputs, *, has_hidden: bool) -> None:
        """Write `source` and pad it; has_hidden: with its hidden states."""
        rows, (seqs, pages) = source.num_rows, source.block_table.shape
        self._clear(rows if has_hidden else 0)
        if has_hidden:
            self._write_hidden(source.hidden_states)
        self._positions[..., :rows] = source.positions.numpy()
        if source.token_ids is not None:
            self._token_ids[:rows] = source.token_ids.numpy()
        self._slot_mapping[:rows] = source.slot_mapping.numpy()
        self._seq_ids[:rows] = source.seq_ids.numpy()
        self._kv_lens[:rows] = source.kv_lens.numpy()
        self._block_table[:seqs, :pages] = source.block_table.numpy()
        self._keep[: source.num_kept] = range(rows) if source.keep is None else source.keep.numpy()
        if self._states is not None and source.states is not None:
            self._states.write(source.states)

    def write_tokens(self, hidden_states: Tensor, token_ids: Tensor) -> None:
        """Write the tokens of a step of which `write` has written all else."""
        self._write_hidden(hidden_states)
        self._token_ids[: len(token_ids)] = token_ids.numpy()

    def _write_hidden(self, hidden_states: Tensor) -> None:
        for first in range(0, len(hidden_states), self._at_once):  # numpy knows no bf16
            end = first + self._at_once
            self._hidden[first : min(end, len(hidden_states))] = hidden_states[first:end]


class _HostStates:
    """The StateStep of a graph as arrays: padded with sequences that have no rows, and keep no state."""

    def __init__(self, views: StateStep) -> None:
        self._first_rows, self._read = views.first_rows.numpy(), views.read_slots.numpy()
        self._written, self._saved = views.write_slots.numpy(), views.save_slots.numpy()

    def clear(self) -> None:
        for slots in (self._read, self._written, self._saved):
            slots[:] = -1
        self._first_rows[:] = 0

    def write(self, source: StateStep) -> None:
        seqs, first_rows = source.num_seqs, source.first_rows.numpy()
        self._first_rows[: seqs + 1] = first_rows
        self._first_rows[seqs + 1 :] = first_rows[-1]
        self._read[:seqs] = source.read_slots.numpy()
        self._written[:seqs] = source.write_slots.numpy()
        self._saved[: len(source.save_slots)] = source.save_slots.numpy()


class StaticInputs:
    """The inputs of a graph of B rows: where they lie on the device, and pinned memory from which one copy fills them.

    A row without a token writes no key (slot -1) and attends to nothing (length 0, for which attention gives zeros), so
    that padding needs no page of its own and costs attention nothing; it belongs to no sequence, and a sequence without
    rows has no state. size: of steps; a number for rows of sequences of their own. where: a device, or memory there
    that is shared with other graphs. width, dtype: of hidden states. has_states: whether layers are recurrent.
    """

    def __init__(
        self,
        size: StepSize | int,
        num_pages: int,
        where: torch.device | InputMemory,
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        has_states: bool = False,
    ) -> None:
        self.size = StepSize(size, size) if isinstance(size, int) else size
        memory = where if isinstance(where, InputMemory) else InputMemory(where)
        extent = _Extent(self.size, num_pages, width, dtype, has_states)
        self.num_pages, self.device, self._memory = num_pages, memory.device, memory
        self._data, staged = memory.take(extent.nbytes)
        self.inputs, self._hosts = extent.views(self._data), [_HostInputs(extent, one) for one in staged]
        if self.size.layers:
            self.inputs = replace(self.inputs, pictures=self._adding_nothing(width, dtype))
        shared = memory.shared if self.size.rows <= SHARED_ROWS else ()
        self._shared = [_HostInputs(extent, slot[: extent.nbytes]) for slot in shared]
        self.pad()

    def _adding_nothing(self, width: int, dtype: torch.dtype) -> PictureRows:
        """All rows of the graph, to each of which zeros are added behind each layer: where pictures write theirs."""
        rows = torch.arange(self.size.rows, device=self.device)
        shape, empty = (self.size.rows, width), torch.empty(0, width, dtype=dtype, device=self.device)
        zeros = {layer: torch.zeros(shape, dtype=dtype, device=self.device) for layer in self.size.layers}
        return PictureRows(rows, empty, zeros)

    @property
    def is_shared(self) -> bool:
        """Whether other processes can have these inputs as they are, see `publish`."""
        return bool(self._shared)

    def pad(self) -> None:
        """Fill the inputs with rows that hold no token."""
        self._next_host().pad()
        self.send()

    def _next_host(self) -> _HostInputs:
        """The memory that was not written last."""
        self._memory.turn = 1 - self._memory.turn
        return self._hosts[self._memory.turn]

    def send(self) -> None:
        """Copy what was staged last to the device, in the order of the current stream."""
        self._data.copy_(self._hosts[self._memory.turn].data, non_blocking=True)

    def fill(self, source: DecodeInputs) -> None:
        """Take `source`, on the CPU, and pad it. Nothing may still read what was filled in before.

        Its hidden states may be on the device already.
        """
        self.stage(source)
        self.send()
        if source.hidden_states.device == self.device and self.device.type != "cpu":
            self.inputs.hidden_states[: source.num_rows] = source.hidden_states
        if self.inputs.pictures is not None:
            self._add(source.pictures)

    def _add(self, pictures: PictureRows | None) -> None:
        """Take what pictures add behind layers, in the order of the current stream."""
        assert self.inputs.pictures is not None, "this size has room for it"
        shown = None if pictures is None else pictures.to(self.device)
        for layer, added in self.inputs.pictures.by_layer.items():
            added.zero_()
            if shown is not None:
                added.index_copy_(0, shown.rows, shown.by_layer[layer].to(added.dtype))

    def stage(self, source: DecodeInputs) -> None:
        """Take `source`, on the CPU, and pad it, for `send`. The step before the last one must be over.

        Hidden states that are elsewhere are left out: `complete` may bring them.
        """
        self._next_host().write(source, has_hidden=source.hidden_states.device.type == "cpu")

    def complete(self, hidden_states: Tensor, token_ids: Tensor) -> None:
        """Bring a step's tokens to what was staged last, before it is sent: hidden states [T, H] and int64 [T], on the
        CPU."""
        self._hosts[self._memory.turn].write_tokens(hidden_states, token_ids)

    def publish(self, source: DecodeInputs) -> None:
        """Take `source` as `fill` does, hidden states included, but let other processes `take` it first. Raises
        EngineError where one of them is gone."""
        blocks = self._memory.blocks
        assert blocks is not None, "only inputs in shared memory are published"
        host = self._shared[blocks.begin()]
        host.write(source, has_hidden=True)
        blocks.publish(self.size.rows, self.size.seqs, self.size.kept, source.num_rows)
        self._data.copy_(host.data, non_blocking=True)

    def take(self, slot: int, *, non_blocking: bool) -> None:
        """Take what another process has published in a slot of the shared memory."""
        self._data.copy_(self._shared[slot].data, non_blocking=non_blocking)


def shared_nbytes(
    sizes: Iterable[StepSize], num_pages: int, width: int, dtype: torch.dtype, *, has_states: bool
) -> int:
    """Bytes that the largest of those steps takes whose inputs can be shared, see StaticInputs."""
    extents = (_Extent(size, num_pages, width, dtype, has_states) for size in sizes if size.rows <= SHARED_ROWS)
    return max(extent.nbytes for extent in extents)
