"""Drafts how a sequence goes on from where its last tokens stood before: prompt lookup, or n-gram drafting.

    predicted tokens ── if the request brings any ──┐
                                                    ├──> searched as one
    prompt and answer ──────────────────────────────┘

    ... the cat sat on the mat. Then the cat sat on ──> the mat. Then
            └────── match ──────┘ draft  └─ last tokens ─┘

Answers repeat their prompts: code that is edited, documents that are quoted, tables, tool calls. Knows ids only. Scans
the tokens where the last draft was wrong; where it was right, the match is one token longer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ktransformers.scheduler.drafting.acceptance import AcceptanceRates

__all__ = ["MAX_MATCH", "MIN_MATCH", "PromptLookup"]

MIN_MATCH = 2
"""Tokens that have to be the same before what follows them is a draft."""

MAX_MATCH = 16
"""Tokens that are compared: a longer match tells no more."""

WINDOW = 1 << 16
"""Tokens that are scanned, the last ones: that takes some 20 us."""


class PromptLookup:
    """A Drafter of one sequence, from its own tokens.

    rates: of all sequences; None: its own. prediction_ids: tokens that its sender expects of the answer, searched as if
    they stood before the prompt, and no part of the sequence. match_len: tokens before the next one that are the same
    as those before its draft, up to MAX_MATCH; 0: there is no draft.
    """

    def __init__(
        self,
        token_ids: Sequence[int] = (),
        rates: AcceptanceRates | None = None,
        prediction_ids: Sequence[int] = (),
    ) -> None:
        self._rates = rates or AcceptanceRates(MAX_MATCH)
        self._ids: npt.NDArray[np.int32] = np.array([*prediction_ids, *token_ids], dtype=np.int32)
        self._len, self._num_predicted = self._ids.size, len(prediction_ids)
        self._next = 0  # where the draft of the next token stands
        self.match_len = 0
        self._find()

    def __len__(self) -> int:
        """Number of the sequence's tokens."""
        return self._len - self._num_predicted

    def add(self, token_id: int) -> bool | None:
        """Take the sequence's next token, see Drafter.add: whether it was as drafted counts."""
        was_right = None
        if self.match_len:
            was_right = int(self._ids[self._next]) == token_id
            self._rates.add(self.match_len, was_right)
        if self._len == self._ids.size:
            self._ids = np.concatenate((self._ids, np.empty(max(self._len, 256), np.int32)))
        self._ids[self._len] = token_id
        self._len += 1
        if was_right:
            self._next += 1
            self.match_len = min(self.match_len + 1, MAX_MATCH)
        else:
            self._find()
        return was_right

    def chances(self, most: int) -> list[float]:
        """Return the chances of the first tokens of `draft`, see Drafter.chances."""
        return self._rates.chances(self.match_len, most) if self.match_len else []

    def draft(self, most: int) -> list[int]:
        """Return `most` tokens that may come next, none without a match. Where they reach the sequence's end they begin
        anew: what repeats goes on repeating."""
        if not self.match_len:
            return []
        found: list[int] = self._ids[self._next : min(self._next + most, self._len)].tolist()
        period = len(found)
        for i in range(period, most):
            found.append(found[i - period])
        return found

    def _find(self) -> None:
        """Find the longest match, the latest of several."""
        self.match_len = 0
        first = max(self._len - WINDOW, 0)
        ids = self._ids[first : self._len]
        if len(ids) <= MIN_MATCH:
            return
        places = np.flatnonzero(ids[MIN_MATCH - 1 : -1] == ids[-1]) + MIN_MATCH  # of what follows
        length = 1
        while places.size and length < MAX_MATCH:
            longer = places[places > length]
            longer = longer[ids[longer - length - 1] == ids[-length - 1]]
            if not longer.size:
                break
            places, length = longer, length + 1
        if places.size and length >= MIN_MATCH:
            self._next, self.match_len = first + int(places[-1]), length
