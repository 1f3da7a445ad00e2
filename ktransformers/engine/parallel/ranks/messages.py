"""Messages between the driver and the other processes of a model: msgpack in frames on their standard streams.

driver ── Start ──────────> reads headers, cuts, loads
       <────── Loaded / Failed
       ── Begin ──────────> meets the others, captures its graphs
       <────── Captured / Failed
       ── Step, Step, ... > computes each, and says nothing; steps in shared memory are between them (StepBlocks)
       ── Regroup ────────> another process has taken the place of one that ended: meets them anew
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

import msgspec
import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import Phase
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext, PictureRows, StateStep

__all__ = ["Begin", "Captured", "Failed", "Loaded", "Made", "Regroup", "Start", "Step", "decode", "encode"]


class Made(msgspec.Struct, frozen=True):
    """How to make a model without files: its config as JSON, the routing of its random weights."""

    hf_config: str
    routing: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """The driver's order to load a part of the model. config: with what the driver's plan has resolved. hardware:
    "module:function" that finds what there is. is_apart: whether the process has a machine of its own. memory_budget:
    bytes by device that it may take there, {} for what is free. divided: routed experts of which each process has a
    part. blocks: where memory is in which steps come, see StepBlocks; "" where all come as messages."""

    rank: int
    name: str
    config: EngineConfig
    page_size: int
    max_batch_size: int
    num_states: int
    hardware: str
    log_level: str
    made: Made | None = None
    is_apart: bool = False
    memory_budget: dict[str, int] = {}
    divided: tuple[str, ...] = ()
    blocks: str = ""


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The driver's order to rendezvous with the other processes and to capture graphs. place: where, a file or
    tcp://HOST:PORT. sizes: (rows, sequences, kept logits) of steps that are padded. is_captured: whether graphs are
    made."""

    place: str
    sizes: list[tuple[int, int, int]]
    is_captured: bool


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """The pictures in the rows of a step, see PictureRows. rows: int64 [N], hidden and by_layer: fp32 [N, width] each,
    ends and starts: int32 [T], pool_starts: int64 [3, T], positions: int64 [3, T], routed: int64 [M], gaps: int64
    [2, G]; empty where there are none."""

    width: int
    rows: bytes
    hidden: bytes
    by_layer: dict[int, bytes]
    ends: bytes
    starts: bytes
    pool_starts: bytes
    positions: bytes
    ends_in_full: bool
    ends_in_windows: bool
    routed: bytes
    added_to: int | None
    gaps: bytes

    @classmethod
    def of(cls, pictures: PictureRows, positions: torch.Tensor) -> Shown:
        """Make the part of a step's message. positions: of the step."""
        return cls(
            pictures.hidden.shape[-1],
            _bytes(pictures.rows),
            _bytes(pictures.hidden.float()),
            {layer: _bytes(part.float()) for layer, part in pictures.by_layer.items()},
            _bytes(pictures.ends),
            _bytes(pictures.starts),
            _bytes(pictures.pool_starts),
            _bytes(positions if positions.dim() == 2 else None),
            pictures.ends_in_full,
            pictures.ends_in_windows,
            _bytes(pictures.routed),
            pictures.added_to,
            _bytes(pictures.gaps),
        )

    def pictures(self) -> PictureRows:
        """Return what is shown."""
        return PictureRows(
            _numbers(self.rows, np.int64),
            _numbers(self.hidden, np.float32).view(-1, self.width),
            {layer: _numbers(part, np.float32).view(-1, self.width) for layer, part in self.by_layer.items()},
            _numbers(self.ends, np.int32) if self.ends else None,
            _numbers(self.starts, np.int32) if self.starts else None,
            self.axes(self.pool_starts),
            self.ends_in_full,
            self.ends_in_windows,
            _numbers(self.routed, np.int64) if self.routed else None,
            self.added_to,
            _numbers(self.gaps, np.int64).view(2, -1) if self.gaps else None,
        )

    @staticmethod
    def axes(data: bytes) -> torch.Tensor | None:
        """Return positions [3, T]; None of empty ones."""
        return _numbers(data, np.int64).view(3, -1) if data else None


def _bytes(part: torch.Tensor | None) -> bytes:
    return b"" if part is None else part.cpu().contiguous().numpy().tobytes()


def _numbers(data: bytes, dtype: type[np.generic]) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=dtype))


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A flattened step, in few pieces: workers begin a step later by what it takes to put it together again.

    is_padded: to the size of a graph. num_kept, num_seqs, num_pages: logits kept, shape of the block table. longs:
    token_ids [T], positions [T], slots [T] and kept rows, int64. ints: seq_ids [T], kv_lens [T], block table and, with
    states, their bounds, reads, writes and saves, int32. states: the lengths of these four, and the most rows of a
    sequence. shown: of pictures; positions of three axes are there, and the first of them here.
    """

    is_padded: bool
    is_prefill: bool
    page_size: int
    num_kept: int
    num_seqs: int
    num_pages: int
    longs: bytes
    ints: bytes
    states: tuple[int, int, int, int, int | None] | None
    shown: Shown | None = None

    @classmethod
    def of(cls, batch: ForwardBatch, is_padded: bool) -> Step:
        """Make the message of a step."""
        token_ids, positions, context, keep = batch.token_ids, batch.positions, batch.context, batch.keep
        states, table = context.states, context.block_table
        longs = torch.cat((token_ids, positions.view(-1, len(token_ids))[0], context.slot_mapping, keep))
        parts, lengths = [context.seq_ids, context.kv_lens, table.reshape(-1)], None
        if states is not None:
            of_states = [states.first_rows, states.read_slots, states.write_slots, states.save_slots]
            parts += of_states
            bounds, reads, writes, saves = (len(part) for part in of_states)
            lengths = bounds, reads, writes, saves, states.max_rows
        ints = torch.cat(parts)
        assert (longs.dtype, ints.dtype) == (torch.int64, torch.int32), "numbers of a step are of one type each"
        return cls(
            is_padded,
            context.phase is Phase.PREFILL,
            context.page_size,
            len(keep),
            table.shape[0],
            table.shape[1],
            longs.numpy().tobytes(),
            ints.numpy().tobytes(),
            lengths,
            None if context.pictures is None else Shown.of(context.pictures, positions),
        )

    def batch(self, cache: PagedCache, pool: WorkerPool) -> ForwardBatch:
        """Return the step over a cache of one's own."""
        longs = np.frombuffer(bytearray(self.longs), dtype=np.int64)
        ints = np.frombuffer(bytearray(self.ints), dtype=np.int32)
        rows, pages = (len(longs) - self.num_kept) // 3, self.num_seqs * self.num_pages
        token_ids, positions, slots, keep = _split(longs, rows, rows, rows, self.num_kept)
        lengths = () if self.states is None else self.states[:4]
        seq_ids, kv_lens, table, *of_states = _split(ints, rows, rows, pages, *lengths)
        states = None
        if self.states is not None:
            bounds, reads, writes, saves = of_states
            states = StateStep(bounds, reads, writes, saves, kv_lens, self.states[4])
        axes = None if self.shown is None else self.shown.axes(self.shown.positions)
        context = ForwardContext(
            cache=cache,
            pool=pool,
            phase=Phase.PREFILL if self.is_prefill else Phase.GENERATE,
            page_size=self.page_size,
            slot_mapping=slots,
            seq_ids=seq_ids,
            kv_lens=kv_lens,
            block_table=table.view(self.num_seqs, self.num_pages),
            states=states,
            turned=positions if axes is None else None,
            pictures=None if self.shown is None else self.shown.pictures(),
        )
        return ForwardBatch(token_ids, positions if axes is None else axes, context, keep)


def _split(numbers: np.ndarray[Any, Any], *lengths: int) -> list[torch.Tensor]:
    """Tensors of so many numbers each, one behind the other. torch's own split takes several times as long."""
    ends = itertools.accumulate(lengths)
    return [torch.from_numpy(numbers[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


class Regroup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The driver's order to rendezvous anew after a process was replaced. place: as Begin has it. Steps before it that
    were not computed never will be."""

    place: str


class Loaded(msgspec.Struct, frozen=True, tag=True):
    """A worker's message that its part is loaded: what has to be as the driver has it."""

    num_slots: int
    num_states: int


class Captured(msgspec.Struct, frozen=True, tag=True):
    """A worker's message that its graphs are captured: their (rows, sequences)."""

    sizes: list[tuple[int, int, int]]


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker's message that it cannot go on. error: the name of a class in errors.py."""

    error: str
    message: str


def encode(message: Any) -> bytes:
    """Encode a message as msgpack; paths as text."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message of type `kind`. Raises msgspec.ValidationError for anything else."""
    return _decoder(kind).decode(data)


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of a type, which takes longer to make than to use."""
    return msgspec.msgpack.Decoder(kind, dec_hook=lambda type, value: type(value))
