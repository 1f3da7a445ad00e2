"""Lends the memory of expert slots to steps that are longer than chunk_size, and says from which prompt on that pays.

A streamed step copies the experts that have no slot once, however many rows it has, so that longer steps copy less for
a token. What grows with the rows of a layer's experts are their results (K of each row), which lie in lent slots: of
one GPU's largest pool the last ones, in the memory of each projection as many blocks of chunk_size rows as fit. What
attention takes grows no more, as it takes a step in blocks (operators/context.py). The experts that are worth least
lose their slots; when a step is no long one, the best ones are uploaded again while steps go on.

Pays, by the rates that were measured at start: what fewer copies save of a prompt is more than lent slots cost, copies
of their experts in each step and the uploads afterwards. Knows rates, pools and prefills; not sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ktransformers.operators.experts.gpu_slots import HotPool
from ktransformers.operators.experts.split import STEP_COST, PrefillRates, choose_split, even_counts
from ktransformers.operators.experts.streamed import ExpertPrefill, PrefillShape

__all__ = ["NO_LONG_STEPS", "Lending", "LongSteps", "choose_long_steps", "lent_slots", "prompt_seconds"]

logger = logging.getLogger(__name__)

_ALIGNED = 256
_MOST_SHARE = 0.5  # of a pool's slots that are lent
_LEAST_GAIN = 0.05
_CHUNKS = 16  # of the longest prompt that is looked at


@dataclass(frozen=True, slots=True)
class LongSteps:
    """Steps on lent memory. rows: most of one; num_slots: that are lent; least_tokens: of prompts that wait, from which
    it pays. All 0: it never does.
    """

    rows: int = 0
    num_slots: int = 0
    least_tokens: int = 0


NO_LONG_STEPS = LongSteps()


def lent_slots(num_blocks: int, block_nbytes: int, part_nbytes: Sequence[int]) -> int:
    """Return the fewest slots whose memory holds num_blocks blocks, none of them across two projections. part_nbytes:
    bytes of an expert in each projection.
    """
    fitting = sorted(
        -(-(count * block_nbytes + _ALIGNED) // nbytes) for nbytes in part_nbytes for count in range(1, num_blocks + 1)
    )
    return next(
        slots for slots in fitting if sum(_blocks_in(slots * n, block_nbytes) for n in part_nbytes) >= num_blocks
    )


def _blocks_in(nbytes: int, block_nbytes: int) -> int:
    return max(nbytes - _ALIGNED, 0) // block_nbytes


def prompt_seconds(tokens: int, rows: int, shape: PrefillShape, num_held: int, rates: PrefillRates) -> float:
    """Return what a layer's experts take of a prompt of `tokens` in steps of `rows`, with even routing and num_held of
    them in slots.
    """
    held = np.linspace(0, shape.num_experts - 1, max(num_held, 0)).astype(np.int64).tolist()

    def step(size: int) -> float:
        counts = even_counts(size, shape.top_k, shape.num_experts)
        return choose_split(counts, rates, held=held).seconds + STEP_COST

    whole, rest = divmod(tokens, rows)
    return whole * step(rows) + (step(rest) if rest else 0.0)


def choose_long_steps(
    shape: PrefillShape, rates: PrefillRates, num_layers: int, num_slots: int, part_nbytes: Sequence[int], itemsize: int
) -> LongSteps:
    """Choose the rows of long steps, at most shape.long_rows, and the prompts from which they pay.

    num_layers, num_slots, part_nbytes: of the pool that lends. itemsize: bytes of a value between products.
    """
    chunk = shape.max_rows
    block_nbytes = chunk * shape.top_k * shape.hidden_size * itemsize
    lengths = [count * chunk for count in range(2, _CHUNKS + 1)]
    plain = [num_layers * prompt_seconds(n, chunk, shape, shape.num_held, rates) for n in lengths]
    best, least_seconds = NO_LONG_STEPS, plain[-1]
    for rows in range(2 * chunk, shape.long_rows + 1, chunk):
        lent = lent_slots(rows // chunk - 1, block_nbytes, part_nbytes)
        if lent > _MOST_SHARE * num_slots:
            break
        held = shape.num_held - -(-lent // num_layers)
        took = [num_layers * prompt_seconds(n, rows, shape, held, rates) + lent * rates.copy for n in lengths]
        pays = [long <= (1.0 - _LEAST_GAIN) * short for long, short in zip(took, plain, strict=True)]
        first = len(pays) - next((i for i, one in enumerate(reversed(pays)) if not one), len(pays))
        if first < len(pays) and took[-1] < least_seconds:
            best, least_seconds = LongSteps(rows, lent, lengths[first]), took[-1]
    return best


@dataclass(slots=True)
class Lending:
    """Slots of a pool that are lent to the steps of an ExpertPrefill. Calls are made by the thread that runs steps.

    times: how often they were. is_on: whether they are now.
    """

    pool: HotPool
    prefill: ExpertPrefill
    steps: LongSteps
    times: int = 0
    is_on: bool = False
    _is_filling: bool = field(default=False, init=False)

    def set(self, is_long: bool) -> None:
        """Lend the slots before a long step, or take them back before another one, whichever is due."""
        if is_long != self.is_on and self.steps.rows:
            self.is_on = is_long
            self._lend() if is_long else self._take_back()
        elif self._is_filling and self.pool.is_refilled:
            self._is_filling = False
            logger.info("the %d lent slots are filled again", self.steps.num_slots)

    def _lend(self) -> None:
        steps, shape, kind = self.steps, self.prefill.shape, self.prefill.device.matmul_dtype
        block_nbytes = shape.max_rows * shape.top_k * shape.hidden_size * kind.itemsize
        blocks = list[torch.Tensor]()
        for memory in self.pool.lend(steps.num_slots):
            first = -memory.data_ptr() % _ALIGNED
            for _ in range(_blocks_in(len(memory), block_nbytes)):
                blocks.append(memory[first : first + block_nbytes].view(kind))
                first += block_nbytes
        self.prefill.lend(blocks[: steps.rows // shape.max_rows - 1])
        self.times += 1
        self._is_filling = False
        logger.info("%d slots of experts are lent to steps of up to %d tokens", steps.num_slots, steps.rows)

    def _take_back(self) -> None:
        self.prefill.lend(())
        self.pool.take_back()
        self._is_filling = True
        logger.info("%d slots of experts are no longer lent, and filled in the background", self.steps.num_slots)
