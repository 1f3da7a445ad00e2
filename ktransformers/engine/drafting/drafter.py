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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.engine.drafting.draws import draw_drafts
from ktransformers.engine.media.rows import RunPictures
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.drafts import ComputedRow, DraftRequest
from ktransformers.kernels.cpu import WorkerPool

__all__ = [
    "MAX_WAITING",
    "DraftForward",
    "DraftLimits",
    "DraftOutput",
    "LogitsRequest",
    "ModelDrafter",
    "Pages",
    "Piece",
    "packed",
]

logger = logging.getLogger(__name__)

MAX_WAITING = 32
"""Tokens of a sequence that wait at most. A step of so many reads the weights of most models hardly more often than
one of a few."""

Pages = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Piece:
    """Entries of one sequence that a draft model is to run, from position `start` on. hidden_states: [n, H] of an MTP
    layer, None of others, and of a token behind a step that was run with `behind`, where they are in place. pictures:
    of the sequence, None: it has none."""

    run_id: int
    start: int
    token_ids: Sequence[int]
    pages: Pages
    hidden_states: torch.Tensor | None = None
    pictures: RunPictures | None = None

    @property
    def end(self) -> int:
        """The position behind it."""
        return self.start + len(self.token_ids)

    def cut(self, begin: int, end: int) -> Piece:
        """Return its entries begin .. end - 1."""
        hidden = None if self.hidden_states is None else self.hidden_states[begin:end]
        return replace(self, start=self.start + begin, token_ids=self.token_ids[begin:end], hidden_states=hidden)


LogitsRequest: TypeAlias = int | None
"""What is needed of the logits behind a piece, see engine/sampling/logits_request.py; None: nothing."""


@dataclass(frozen=True, slots=True)
class DraftOutput:
    """What a draft model says behind the last entry of each piece of which logits are requested: N of them, as far as
    they are, on the CPU and good until the next step; of an MTP layer also hidden states [N, H], where it is, None for
    N = 0 and where the next step has them."""

    logits: StepLogits
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

    @property
    def is_fixed(self) -> bool:
        """Whether all of a sequence's draft tokens come from the position of its last entry: the draft model attends to
        its target's keys and values, has none of its own, and never has to run what comes before."""
        ...

    def run(
        self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int] = (), depth: int = 0
    ) -> DraftOutput:
        """Run a step, at most one piece of each sequence. requests: one for each piece. behind: pieces with a request,
        behind each of which the next step runs a token and nothing else; `drop_held` if it does not. depth: how many
        draft tokens of each sequence are run already, or are in the pieces."""
        ...

    def drop_held(self) -> None:
        """Give up what was launched of a next step that is not run; nothing where there is none."""
        ...

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states [count, H] of rows of its last step, where the draft model is;
        None where none are taken."""
        ...

    def forget(self, run_ids: Iterable[int] | None) -> None:
        """Forget sequences that are over; None: all."""
        ...


@dataclass(slots=True)
class _Run:
    """What a draft model has of a sequence. guessed: draft tokens that it ran behind `next`, each of which counts when
    it was accepted."""

    next: int
    waiting: list[int] = field(default_factory=list)
    hidden_states: list[torch.Tensor] = field(default_factory=list)  # of those that wait, in stretches
    guessed: list[int] = field(default_factory=list)
    pictures: RunPictures | None = None

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

    def take(self, run_id: int, pages: Pages, count: int) -> Piece:
        """The first `count` entries that wait, as run from now on."""
        hidden = None
        if self.hidden_states:
            joined = torch.cat(self.hidden_states) if len(self.hidden_states) > 1 else self.hidden_states[0]
            # What is left is a copy: it would keep all the others in memory.
            hidden, self.hidden_states = joined[:count], [joined[count:].clone()] if count < len(joined) else []
        piece = Piece(run_id, self.next, self.waiting[:count], pages, hidden, self.pictures)
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
        try:
            self._draft_behind(requests, pieces, found)
        finally:
            self._forward.drop_held()  # of a step whose tokens could not be drawn

    def _draft_behind(
        self, requests: Sequence[DraftRequest], pieces: Sequence[Piece], found: dict[int, list[int]]
    ) -> None:
        """Run a piece of each request, and then its draft tokens one by one."""
        for depth in range(max(request.num_drafts for request in requests)):
            left = [i for i, request in enumerate(requests) if request.num_drafts > depth + 1]
            drafted = self._drafted(requests, pieces, depth, left)
            for request, (token_id, _) in zip(requests, drafted, strict=True):
                found[request.run_id][depth] = token_id
            pieces = [self._next_piece(pieces[i], *drafted[i]) for i in left]
            requests = [requests[i] for i in left]
            if not self._forward.shift:
                for request, piece in zip(requests, pieces, strict=True):
                    self._runs[request.run_id].guessed += piece.token_ids

    def _drafted(
        self, requests: Sequence[DraftRequest], pieces: Sequence[Piece], depth: int, left: Sequence[int]
    ) -> list[tuple[int, torch.Tensor | None]]:
        """Run a piece of each request: the draft token behind it, and the hidden state [1, H] that made it. left: the
        requests that want more."""
        samplers = [request.sampler for request in requests]
        needs = [sampler.later_request if depth else sampler.logits_request for sampler in samplers]
        found: list[tuple[int, torch.Tensor | None]] = [(0, None)] * len(pieces)
        for ended, output in self._run(pieces, needs, left, depth):
            places = [requests[i].position + 1 + depth for i in ended]
            tokens = draw_drafts(output.logits, [samplers[i] for i in ended], places, self._pool, is_first=not depth)
            for nth, (i, token_id) in enumerate(zip(ended, tokens, strict=True)):
                hidden = output.hidden_states
                found[i] = token_id, None if hidden is None else hidden[nth : nth + 1]
        return found

    def _next_piece(self, piece: Piece, token_id: int, hidden_states: torch.Tensor | None) -> Piece:
        """What runs a draft token, for the one behind it."""
        start = piece.start if self._forward.is_fixed else piece.end
        return replace(piece, start=start, token_ids=[token_id], hidden_states=hidden_states)

    def observe(self, rows: Sequence[ComputedRow]) -> None:
        """Take in what a step computed; run what has waited for long, but for the last entry of each sequence, which
        says how it goes on."""
        shift, pieces = self._forward.shift, list[Piece]()
        for row in rows:
            if self._forward.is_fixed:
                last = len(row.token_ids) - 1
                hidden = self._forward.hidden_states(row.first + last, 1)
                run = self._runs[row.run_id] = _Run(row.start + last)
                run.add(row.start + last, [row.next_id], hidden)
                continue
            hidden = self._forward.hidden_states(row.first, len(row.token_ids))
            run = self._runs.setdefault(row.run_id, _Run(row.start, pictures=row.pictures))
            tokens = [*row.token_ids[shift:], row.next_id] if shift else list(row.token_ids)
            run.add(row.start, tokens, hidden)
            if len(run.waiting) > MAX_WAITING:
                pieces.append(run.take(row.run_id, row.pages, len(run.waiting) - 1))
        self._run_silently(pieces)

    def end(self, runs: Sequence[tuple[int, Pages]]) -> None:
        """Forget runs, see EngineDrafter.end. What waits of them is run before, for whoever finds their pages."""
        pieces = list[Piece]()
        for run_id, pages in runs:
            run = self._runs.pop(run_id, None)
            if run is not None and run.waiting and self._keeps_prefixes:
                pieces.append(run.take(run_id, pages, len(run.waiting)))
        self._run_silently(pieces)
        self._forward.forget([run_id for run_id, _ in runs])

    def reset(self) -> None:
        """Forget all runs."""
        self._runs.clear()
        self._forward.forget(None)

    def _run_silently(self, pieces: Sequence[Piece]) -> None:
        """Run pieces behind which nothing is drafted."""
        for _ in self._run(pieces, [None] * len(pieces)):
            pass

    def _run(
        self,
        pieces: Sequence[Piece],
        requests: Sequence[LogitsRequest],
        behind: Sequence[int] = (),
        depth: int = 0,
    ) -> Iterator[tuple[list[int], DraftOutput]]:
        """Run pieces in as few steps as have room for them. Yields, for each step in which pieces with a request end,
        their indices and its output, good until the next one. behind, depth: see DraftForward.run."""
        room = self._forward.limits.longest
        num_rows = sum(len(piece.token_ids) for piece in pieces)
        if 0 < num_rows <= self._forward.limits.max_rows and max(piece.end for piece in pieces) <= room:
            output = self._forward.run(pieces, requests, behind, depth)
            yield [i for i, request in enumerate(requests) if request is not None], output
            return
        pieces = [piece.cut(0, max(room - piece.start, 0)) for piece in pieces]
        for step in packed([len(piece.token_ids) for piece in pieces], self._forward.limits.max_rows):
            wanted = [requests[i] if end == len(pieces[i].token_ids) else None for i, _, end in step]
            output = self._forward.run([pieces[i].cut(begin, end) for i, begin, end in step], wanted, depth=depth)
            ended = [i for (i, _, _), request in zip(step, wanted, strict=True) if request is not None]
            if ended:
                yield ended, output


def packed(lengths: Sequence[int], most: int) -> list[list[tuple[int, int, int]]]:
    """Divide stretches of such lengths into steps of up to `most` entries: (stretch, begin, end) of each part, at most
    one of a stretch in a step."""
    steps, room = list[list[tuple[int, int, int]]](), 0
    for i, length in enumerate(lengths):
        begin = 0
        while begin < length:
            if not room:
                steps.append([])
                room = most
            end = min(begin + room, length)
            steps[-1].append((i, begin, end))
            begin, room = end, room - (end - begin)
    return steps
