"""Messages between the driver and the other processes of a model: msgpack in frames on their standard streams.

driver ── Start ──────────> reads headers, cuts, loads
       <────── Loaded / Failed
       ── Begin ──────────> meets the others, captures its graphs
       <────── Captured / Failed
       ── Step, Step, ... > computes each, and says nothing
       ── Regroup ────────> another process has taken the place of one that ended: meets them anew
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import Phase
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext, StateStep

__all__ = ["Begin", "Captured", "Failed", "Loaded", "Made", "Regroup", "Start", "Step", "decode", "encode"]


class Made(msgspec.Struct, frozen=True):
    """How to make a model without files: its config as JSON, the routing of its random weights."""

    hf_config: str
    routing: str


class Start(msgspec.Struct, frozen=True, tag=True):
    """The driver's order to load a part of the model. config: with what the driver's plan has resolved. hardware:
    "module:function" that finds what there is. is_apart: whether the process has a machine of its own. memory_budget:
    bytes by device that it may take there, {} for what is free."""

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


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The driver's order to meet the other processes and to capture graphs. place: where to meet, a file or
    tcp://HOST:PORT. sizes: (rows, sequences, kept logits) of steps that are padded. is_captured: whether graphs are
    made."""

    place: str
    sizes: list[tuple[int, int, int]]
    is_captured: bool


class Step(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A flattened step: arrays as bytes, in the types that ForwardContext says. is_padded: to the size of a graph.
    states: bounds, reads, writes, saves, most rows of a sequence."""

    is_padded: bool
    is_prefill: bool
    page_size: int
    num_seqs: int
    token_ids: bytes
    positions: bytes
    keep: bytes
    slots: bytes
    seq_ids: bytes
    kv_lens: bytes
    table: bytes
    states: tuple[bytes, bytes, bytes, bytes, int | None] | None

    @classmethod
    def of(
        cls,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        keep: torch.Tensor,
        is_padded: bool,
    ) -> Step:
        """Make the message of a step, with the arguments of ModelRunner.reduced_step."""
        states = context.states
        return cls(
            is_padded,
            context.phase is Phase.PREFILL,
            context.page_size,
            context.block_table.shape[0],
            _bytes(token_ids),
            _bytes(positions),
            _bytes(keep),
            _bytes(context.slot_mapping),
            _bytes(context.seq_ids),
            _bytes(context.kv_lens),
            _bytes(context.block_table),
            None
            if states is None
            else (
                _bytes(states.first_rows),
                _bytes(states.read_slots),
                _bytes(states.write_slots),
                _bytes(states.save_slots),
                states.max_rows,
            ),
        )

    def inputs(
        self, cache: PagedCache, pool: WorkerPool
    ) -> tuple[torch.Tensor, torch.Tensor, ForwardContext, torch.Tensor]:
        """Return the step's token_ids, positions, context and keep over a cache of one's own."""
        kv_lens = _ints(self.kv_lens)
        states = None
        if self.states is not None:
            bounds, reads, writes, saves, max_rows = self.states
            states = StateStep(_ints(bounds), _ints(reads), _ints(writes), _ints(saves), kv_lens, max_rows)
        context = ForwardContext(
            cache=cache,
            pool=pool,
            phase=Phase.PREFILL if self.is_prefill else Phase.GENERATE,
            page_size=self.page_size,
            slot_mapping=_longs(self.slots),
            seq_ids=_ints(self.seq_ids),
            kv_lens=kv_lens,
            block_table=_ints(self.table).view(self.num_seqs, -1),
            states=states,
        )
        return _longs(self.token_ids), _longs(self.positions), context, _longs(self.keep)


class Regroup(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The driver's order to meet anew after a process was replaced. place: as Begin has it. Steps before it that were
    not computed never will be."""

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


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _ints(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.int32))


def _longs(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.int64))


def encode(message: Any) -> bytes:
    """Encode a message as msgpack; paths as text."""
    return msgspec.msgpack.encode(message, enc_hook=str)


def decode(data: bytes, kind: Any) -> Any:
    """Decode a message of type `kind`. Raises msgspec.ValidationError for anything else."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=lambda type, value: type(value))
