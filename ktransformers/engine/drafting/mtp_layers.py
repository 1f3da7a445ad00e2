"""Several layers for multi-token prediction as drafter (MiMo, Step): each makes the draft token behind the last one's.

Layer k takes, at a position, the token k + 1 behind it and the hidden state that layer k - 1 made there; the first one
that of the target. Of entries up to position `end` - 1, whose tokens are known up to `end`:

    layer 0   ........... end - 1                    takes known tokens
    layer 1   ....... end - 2 | end - 1              behind the bar it takes the first draft token,
    layer 2   ... end - 3 | end - 2, end - 1         and this one two: both are run again when the tokens are known

What a layer has not run, or runs again, waits as the hidden states of the layer before it, until it is to draft or
there is much of it. Behind the last layer that one goes on with what it makes itself, as a single one does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from ktransformers.engine.drafting.drafter import (
    MAX_WAITING,
    DraftLimits,
    DraftOutput,
    LogitsRequest,
    Piece,
    packed,
)
from ktransformers.engine.drafting.mtp import MtpForward

__all__ = ["MtpLayers"]


@dataclass(slots=True)
class _Waiting:
    """Hidden states [n, H] that wait for a layer, of the entries from `start` on."""

    start: int
    rows: torch.Tensor


@dataclass(slots=True)
class _Run:
    """What layers behind the first one have of a sequence, the latest piece of which is `latest`.

    tokens: those up to position `end`, as far as they are needed. waiting: by layer, from the second one on. drafted:
    tokens behind `tokens`. guessed: what the latest layer made of some of these, [n, H], for the entries up to the last
    one.
    """

    end: int
    latest: Piece
    tokens: list[int] = field(default_factory=list)
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=list)
    guessed: torch.Tensor | None = None

    def go_on(self, piece: Piece, rows: torch.Tensor) -> None:
        """Take in what the first layer made of a piece."""
        self.tokens += piece.token_ids
        self.end, self.latest, self.drafted, self.guessed = piece.end, replace(piece, hidden_states=None), [], None
        self._add(1, piece.start, rows)

    def piece(self, run_id: int, layer: int, *, is_drafting: bool) -> Piece | None:
        """The entries that wait for a layer, with those that take draft tokens or without; None where there are
        none."""
        there = self.waiting.get(layer)
        parts = [] if there is None else [there.rows]
        if is_drafting:
            parts += [] if self.guessed is None else [self.guessed]
            rows = torch.cat(parts)
            start = self.end - len(rows)
        else:
            start = self.end if there is None else there.start
            rows = torch.cat(parts)[: max(self.end - layer - start, 0)] if parts else torch.zeros(0)
        if not len(rows):
            return None
        first = start + layer - self.end + len(self.tokens)
        tokens = [*self.tokens, *self.drafted][first : first + len(rows)]
        return Piece(run_id, start, tokens, self.latest.pages, rows, self.latest.pictures)

    def settle(self, layer: int, piece: Piece, rows: torch.Tensor | None) -> None:
        """Take in what a layer made of `piece`, [n, H]; None: no layer is behind it."""
        known = max(min(self.end - layer, piece.end) - piece.start, 0)
        there = self.waiting.get(layer)
        if there is not None and known:
            there.start, there.rows = there.start + known, there.rows[known:].clone()
        if rows is not None:
            if known:
                self._add(layer + 1, piece.start, rows[:known])
            self.guessed = rows[known:] if known < len(rows) else None
        needed = max((self.end - one.start - number for number, one in self.waiting.items()), default=0)
        del self.tokens[: max(len(self.tokens) - max(needed, 0), 0)]

    def _add(self, layer: int, start: int, rows: torch.Tensor) -> None:
        there = self.waiting.get(layer)
        if there is None or there.start + len(there.rows) != start:
            self.waiting[layer] = _Waiting(start, rows)
        else:
            there.rows = torch.cat([there.rows, rows])


class MtpLayers:
    """The DraftForward of several layers. limits: of all of them; a step must have room for as many entries of each
    sequence as there are layers."""

    shift, is_fixed = 1, False

    def __init__(self, layers: Sequence[MtpForward], limits: DraftLimits) -> None:
        self._layers, self.limits = layers, limits
        self._runs: dict[int, _Run] = {}

    @torch.inference_mode()
    def run(
        self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int] = (), depth: int = 0
    ) -> DraftOutput:
        """Run a step of the layer that makes the draft token `depth`, see DraftForward."""
        last = len(self._layers) - 1
        if depth > last:
            return self._layers[last].run([replace(one, start=one.start - last) for one in pieces], requests, behind)
        if depth:
            return self._draft(depth, pieces, requests, behind)
        self._catch_up({one.run_id for one in pieces if self._has_much(one.run_id)})
        output = self._layers[0].run(pieces, requests)
        for piece, rows in zip(pieces, self._rows(0, pieces), strict=True):
            run = self._runs.get(piece.run_id)
            if run is None or run.end != piece.start:
                run = self._runs[piece.run_id] = _Run(piece.start, piece)
            run.go_on(piece, rows)
        if not any(request is not None for request in requests):
            self._catch_up({one.run_id for one in pieces})
        return DraftOutput(output.logits)

    def _draft(
        self, layer: int, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int]
    ) -> DraftOutput:
        """Run what waits for a layer and what takes draft tokens, the latest of which `pieces` have."""
        runs = {piece.run_id: self._runs[piece.run_id] for piece in pieces}
        for piece in pieces:
            runs[piece.run_id].drafted += piece.token_ids
        most = sum(len(run.waiting[layer].rows) + layer for run in runs.values() if layer in run.waiting)
        if most > self.limits.max_rows:
            self._catch_up(runs, (layer,))
        own = [run.piece(run_id, layer, is_drafting=True) for run_id, run in runs.items()]
        wanted, is_last = [one for one in own if one is not None], layer + 1 == len(self._layers)
        output = self._layers[layer].run(wanted, requests, behind if is_last else ())
        made = [None] * len(wanted) if is_last else self._rows(layer, wanted)
        for one, rows in zip(wanted, made, strict=True):
            runs[one.run_id].settle(layer, one, rows)
        return output

    def _catch_up(self, run_ids: Iterable[int], layers: Iterable[int] | None = None) -> None:
        """Run what waits for these layers and has its tokens, layer by layer; None: for all."""
        runs = [(run_id, self._runs[run_id]) for run_id in run_ids]
        for layer in range(1, len(self._layers)) if layers is None else layers:
            own = [run.piece(run_id, layer, is_drafting=False) for run_id, run in runs]
            pieces = [piece for piece in own if piece is not None]
            for step in packed([len(piece.token_ids) for piece in pieces], self.limits.max_rows):
                cut = [pieces[i].cut(begin, end) for i, begin, end in step]
                self._layers[layer].run(cut, [None] * len(cut))
                for one, rows in zip(cut, self._rows(layer, cut), strict=True):
                    self._runs[one.run_id].settle(layer, one, rows if layer + 1 < len(self._layers) else None)

    def _rows(self, layer: int, pieces: Sequence[Piece]) -> list[torch.Tensor]:
        """What a layer's last step made of each of its pieces."""
        lengths = [len(piece.token_ids) for piece in pieces]
        return list(torch.split(self._layers[layer].own_rows(sum(lengths)), lengths))

    def _has_much(self, run_id: int) -> bool:
        run = self._runs.get(run_id)
        return run is not None and any(len(one.rows) > MAX_WAITING for one in run.waiting.values())

    def drop_held(self) -> None:
        """Give up what was launched of a next step, see DraftForward."""
        for layer in self._layers:
            layer.drop_held()

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states, see DraftForward."""
        return self._layers[0].hidden_states(first, count)

    def forget(self, run_ids: Iterable[int] | None) -> None:
        """Forget sequences, see DraftForward."""
        for run_id in list(self._runs) if run_ids is None else run_ids:
            self._runs.pop(run_id, None)
