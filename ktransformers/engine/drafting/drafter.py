"""Keeps a draft model beside the target: which of a sequence's tokens it has run, and which it still has to.

    positions   0 ......... next ......... next + len(waiting) ......... known
                it has run  | waiting      | not computed by the target

A model of its own (`shift` 0) takes, at a position, the token there. An MTP layer (`shift` 1) takes the hidden state
that the target's last layer has there, and the token of the next position: its entry for the last computed position
holds the token that was sampled behind it. Both say what comes behind the token that they took.

Tokens wait until there are enough for a step that reads the weights once for all of them, or until the sequence wants
draft tokens. Then these run first, and one step for each further draft token. What was drafted and accepted stays: a
model of its own has run it already; an MTP layer runs it again, with the hidden states of the target.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.engine.drafting.draws import draw_drafts
from ktransformers.engine.sampling.sampler import RequestSampler
from ktransformers.engine.step.drafts import ComputedRow, DraftRequest
from ktransformers.kernels.cpu import WorkerPool

__all__ = ["DraftForward", "DraftLimits", "DraftOutput", "ModelDrafter", "Piece"]

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Tokens of a sequence that wait at most. A step of so many reads the weights of most models hardly more often than
one of a few."""

_Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries of one sequence that a draft model is to run, from position `start` on. hidden_states: [n, H] of an MTP
    layer, None of others."""

    run_id: int
    start: int
    token_ids: Sequence[int]
    pages: _Pages
    hidden_states: torch.Tensor | None = None

    def cut(self, begin: int, end: int) -> Piece:
        """Return its entries begin .. end - 1."""
        hidden = None if self.hidden_states is None else self.hidden_states[begin:end]
        return Piece(self.run_id, self.start + begin, self.token_ids[begin:end], self.pages, hidden)


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """What a draft model says behind the last entry of each piece: fp32 logits [N, V] on the CPU, and of an MTP layer
    hidden states [N, H]."""

    logits: torch.Tensor
    hidden_states: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What a draft model can do. max_rows: most entries of a step. longest: number of positions. vocab_size: of the
    target, which its logits are of."""

    max_rows: int
    longest: int
    vocab_size: int


class DraftForward(Protocol):
    """Runs a draft model's steps. See DraftModelForward."""

    @property
    def shift(self) -> int:
        """How many positions behind its own the token of an entry stands: 0 or 1, see the module's docstring."""
        ...

    @property
    def limits(self) -> DraftLimits:
        """What it can do."""
        ...

    def run(self, pieces: Sequence[Piece], *, wants_output: bool) -> DraftOutput | None:
        """Run a step, at most one piece of each sequence. None where no output is wanted."""
        ...

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states [count, H] of rows of its last step; None where none are
        taken."""
        ...


@dataclass(slots=True)
class _Run:
    """What a draft model has of a sequence. guessed: draft tokens that it ran behind `next`, each of which counts when
    it was accepted."""

    next: int
    waiting: list[int] = field(default_factory=list)
    hidden_states: list[torch.Tensor] = field(default_factory=list)  # of those that wait, in stretches
    guessed: list[int] = field(default_factory=list)

    def add(self, start: int, token_ids: Sequence[int], hidden_states: torch.Tensor | None) -> None:
        """Take in entries from `start` on, of which it may have some already."""
        end = self.next + len(self.waiting)
        if start > end:  # it was not shown what is between
            self.next, self.waiting, self.hidden_states, self.guessed = start, [], [], []
            end = start
        known = end - start
        if not self.waiting:
            while known < len(token_ids) and self.guessed and self.guessed[0] == token_ids[known]:
                del self.guessed[0]
                self.next, known = self.next + 1, known + 1
        if known >= len(token_ids):
            return
        self.guessed.clear()
        self.waiting += token_ids[known:]
        if hidden_states is not None:
            self.hidden_states.append(hidden_states[known:])

    def take(self, run_id: int, pages: _Pages, count: int) -> Piece:
        """The first `count` entries that wait, as run from now on."""
        hidden = None
        if self.hidden_states:
            joined = torch.cat(self.hidden_states) if len(self.hidden_states) > 1 else self.hidden_states[0]
            hidden, self.hidden_states = joined[:count], [joined[count:]] if count < len(joined) else []
        piece = Piece(run_id, self.next, self.waiting[:count], pages, hidden)
        self.next += count
        self.waiting = self.waiting[count:]
        return piece


class ModelDrafter:
    """The EngineDrafter of a draft model. pool: whose threads draw. keeps_prefixes: whether pages are found again by
    other sequences, so that it pays to fill them to the end."""

    def __init__(self, forward: DraftForward, pool: WorkerPool, *, keeps_prefixes: bool = True) -> None:
        self._forward, self._pool, self._keeps_prefixes = forward, pool, keeps_prefixes
        self._runs: dict[int, _Run] = {}
        self._has_said = False

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        """Return num_drafts token ids for each request, all of them 0 where the draft model can say nothing."""
        found = {request.run_id: [0] * request.num_drafts for request in requests}
        able = [request for request in requests if self._is_ready(request)]
        if able:
            self._draft(able, found)
        return [found[request.run_id] for request in requests]

    def _is_ready(self, request: DraftRequest) -> bool:
        """Whether there is something to run from which draft tokens follow."""
        if request.position + request.num_drafts > self._forward.limits.longest:
            if not self._has_said:
                self._has_said = True
                logger.info(
                    "the draft model knows %d positions: nothing is drafted behind", self._forward.limits.longest
                )
            return False
        shift = self._forward.shift
        run = self._runs.setdefault(request.run_id, _Run(request.position - shift))
        if not shift:
            run.add(request.position, [request.token_id], None)
        return bool(run.waiting)

    def _draft(self, requests: list[DraftRequest], found: dict[int, list[int]]) -> None:
        runs = [self._runs[request.run_id] for request in requests]
        pieces = [
            run.take(request.run_id, request.pages, len(run.waiting))
            for run, request in zip(runs, requests, strict=True)
        ]
        for run in runs:
            run.guessed.clear()
        for depth in range(max(request.num_drafts for request in requests)):
            output = self._run(pieces, wants_output=True)
            assert output is not None
            samplers: list[RequestSampler] = [request.sampler for request in requests]
            places = [request.position + 1 + depth for request in requests]
            tokens = draw_drafts(output.logits, samplers, places, self._pool, is_first=depth == 0)
            for request, token_id in zip(requests, tokens, strict=True):
                found[request.run_id][depth] = token_id
            left = [i for i, request in enumerate(requests) if request.num_drafts > depth + 1]
            pieces = [self._next_piece(pieces[i], tokens[i], output, i) for i in left]
            requests = [requests[i] for i in left]
            if not self._forward.shift:
                for request, piece in zip(requests, pieces, strict=True):
                    self._runs[request.run_id].guessed += piece.token_ids

    @staticmethod
    def _next_piece(piece: Piece, token_id: int, output: DraftOutput, index: int) -> Piece:
        """What runs a draft token, for the one behind it."""
        hidden = None if output.hidden_states is None else output.hidden_states[index : index + 1]
        return Piece(piece.run_id, piece.start + len(piece.token_ids), [token_id], piece.pages, hidden)

    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """Take in what a step computed; run what has waited for long, but for the last entry of each sequence, which
        says how it goes on."""
        shift, pieces = self._forward.shift, list[Piece]()
        for row in rows:
            hidden = self._forward.hidden_states(row.first, len(row.token_ids))
            run = self._runs.setdefault(row.run_id, _Run(row.start))
            tokens = [*row.token_ids[shift:], row.next_id] if shift else list(row.token_ids)
            run.add(row.start, tokens, hidden)
            if len(run.waiting) > MAX_WAITING:
                pieces.append(run.take(row.run_id, row.pages, len(run.waiting) - 1))
        self._run(pieces, wants_output=False)

    def end(self, runs: Sequence[tuple[int, _Pages]]) -> None:
        """Forget runs, see EngineDrafter.end. What waits of them is run before, for whoever finds their pages."""
        pieces = list[Piece]()
        for run_id, pages in runs:
            run = self._runs.pop(run_id, None)
            if run is not None and run.waiting and self._keeps_prefixes:
                pieces.append(run.take(run_id, pages, len(run.waiting)))
        self._run(pieces, wants_output=False)

    def reset(self) -> None:
        """Forget all runs."""
        self._runs.clear()

    def _run(self, pieces: Sequence[Piece], *, wants_output: bool) -> DraftOutput | None:
        """Run pieces in steps that are small enough, all but the last entries of each without output."""
        room, most = self._forward.limits.longest, self._forward.limits.max_rows
        pieces = [piece.cut(0, max(room - piece.start, 0)) for piece in pieces]
        pieces = [piece for piece in pieces if piece.token_ids]
        lasts = list[Piece]()
        for piece in pieces:
            begin, length = 0, len(piece.token_ids)
            while (wants_output and length - begin > most) or (not wants_output and begin < length):
                self._forward.run([piece.cut(begin, min(begin + most, length))], wants_output=False)
                begin += most
            lasts.append(piece.cut(begin, length))
        if not wants_output:
            return None
        outputs = list[DraftOutput]()
        while lasts:
            count, total = 1, len(lasts[0].token_ids)
            while count < len(lasts) and total + len(lasts[count].token_ids) <= most:
                total += len(lasts[count].token_ids)
                count += 1
            output = self._forward.run(lasts[:count], wants_output=True)
            assert output is not None
            outputs.append(output if count == len(lasts) else _copied(output))
            lasts = lasts[count:]
        return _joined(outputs)


def _copied(output: DraftOutput) -> DraftOutput:
    """The same in memory of its own: a step's logits are good until the next one."""
    hidden = output.hidden_states
    return DraftOutput(output.logits.clone(), None if hidden is None else hidden.clone())


def _joined(outputs: Sequence[DraftOutput]) -> DraftOutput:
    if len(outputs) == 1:
        return outputs[0]
    hidden = [output.hidden_states for output in outputs if output.hidden_states is not None]
    return DraftOutput(torch.cat([output.logits for output in outputs]), torch.cat(hidden) if hidden else None)
