"""Drafts how a sequence goes on from where its last tokens stood before: prompt lookup, or n-gram drafting.

    predicted tokens ── if the request brings any ──┐
                                                    ├──> searched as one
    prompt and answer ──────────────────────────────┘

    ... the cat sat on the mat. Then the cat sat on ──> the mat. Then
            └────── match ──────┘ draft  └─ last tokens ─┘

Answers repeat their prompts: code that is edited, documents that are quoted, tables, tool calls. Knows ids only. Where
the last draft was right, the match is longer; where it was wrong, the places behind the same two tokens are
compared, which are kept in chains by a hash of these. Both take some microseconds, however long the sequence is.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from ktransformers.media.records import MEDIA_ID_BASE, is_media_id
from ktransformers.scheduler.drafting.acceptance import AcceptanceRates

__all__ = ["MAX_CANDIDATES", "MAX_MATCH", "MIN_MATCH", "PACE", "PromptLookup", "behind_next"]

MIN_MATCH = 2
"""Tokens that have to be the same before what follows them is a draft: those that chains are found by."""

MAX_MATCH = 16
"""Tokens that are compared: a longer match tells no more."""

MAX_CANDIDATES = 4
"""Places that are compared, the latest ones."""

PACE = 4096
"""Tokens that are put into chains at a time, which takes a millisecond: a long prompt is not drafted from at once."""

_SPREAD = 0x9E3779B1
"""What the first of two tokens is multiplied by in their hash."""

_LIKELY = 0.5
"""The chance of a draft token from which on it is worth waiting to see whether it is right."""


def behind_next(chances: Sequence[float]) -> tuple[float, tuple[float, ...]]:
    """Return what Drafter.later does, of a drafter that knows what comes next: of its chances, those behind the next
    token; none where that is hardly the drafted one."""
    if not chances or chances[0] <= _LIKELY:
        return 1.0, ()
    return chances[0], tuple(chance / chances[0] for chance in chances[1:])


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
        self._ids = array("i", (*prediction_ids, *token_ids))
        # A place is where something follows two tokens. By hash of these the latest one, and the one before each.
        self._mask = (1 << max(len(self._ids).bit_length(), 8)) - 1
        self._latest = array("i", [-1]) * (self._mask + 1)
        self._before = array("i", [-1]) * MIN_MATCH
        self._num_predicted = len(prediction_ids)
        self._has_pictures = any(map(is_media_id, token_ids))  # whose ids are matched like others, and never drafted
        self._next = 0  # where the draft of the next token stands
        self.match_len = 0
        self._link()
        self._find()

    def __len__(self) -> int:
        """Number of the sequence's tokens."""
        return len(self._ids) - self._num_predicted

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take the sequence's next tokens, see Drafter.extend. Behind the first wrong one nothing counts as drafted."""
        ids, match_len, num = self._ids, self.match_len, len(token_ids)
        num_right = self._took(token_ids) if match_len else 0
        ids.extend(token_ids)
        self._link()
        if match_len and num_right == num and ids[self._next + num] < MEDIA_ID_BASE:
            self._next += num
            self.match_len = min(match_len + num, MAX_MATCH)
        else:
            self._find()

    def _took(self, token_ids: Sequence[int]) -> int:
        """Learn how many of the next tokens, which are not among its own yet, are as drafted. Returns that number."""
        ids, at, end, match_len, rates = self._ids, self._next, len(self._ids), self.match_len, self._rates
        for num_right, token_id in enumerate(token_ids):
            # Where a draft reaches the sequence's end it begins anew, see `draft`.
            drafted = ids[at + num_right] if at + num_right < end else token_ids[at + num_right - end]
            if drafted != token_id:
                break
        else:
            num_right = len(token_ids)
        single = min(num_right, MAX_MATCH - match_len)
        for longer in range(single):
            rates.add(match_len + longer, True)
        if num_right > single:
            rates.add(MAX_MATCH, True, times=num_right - single)
        if num_right < len(token_ids) and drafted < MEDIA_ID_BASE:
            rates.add(match_len + num_right, False)
        return num_right

    def chances(self, most: int) -> tuple[float, ...]:
        """Return the chances of the first tokens of `draft`, see Drafter.chances."""
        return self._rates.chances(self.match_len, self._room(most)) if self.match_len else ()

    def later(self, most: int) -> tuple[float, tuple[float, ...]]:
        """Return the chances behind the next token, see Drafter.later."""
        return behind_next(self.chances(most + 1))

    def draft(self, most: int) -> list[int]:
        """Return `most` tokens that may come next, none without a match. Where they reach the sequence's end they begin
        anew: what repeats goes on repeating."""
        if not self.match_len:
            return []
        most = self._room(most)
        found = self._ids[self._next : self._next + most].tolist()
        period = len(found)
        for i in range(period, most):
            found.append(found[i - period])
        return found

    def _room(self, most: int) -> int:
        """How many of `most` tokens there are to copy: up to the next picture."""
        if not self._has_pictures:
            return most
        found = self._ids[self._next : self._next + most]
        return next((i for i, one in enumerate(found) if is_media_id(one)), most)

    def _link(self) -> None:
        """Put places into their chains, up to PACE of them."""
        ids, latest, before, mask = self._ids, self._latest, self._before, self._mask
        first, end = len(before), len(ids)
        if first == end - 1:  # as mostly
            chain = (ids[first - 2] * _SPREAD + ids[first - 1]) & mask
            before.append(latest[chain])
            latest[chain] = first
            return
        end = min(end, first + PACE)
        for place, one, other in zip(range(first, end), ids[first - 2 : end], ids[first - 1 : end], strict=False):
            chain = (one * _SPREAD + other) & mask
            before.append(latest[chain])
            latest[chain] = place

    def _find(self) -> None:
        """Find the longest match among the latest places of its chain, the latest of several."""
        self.match_len = best = 0
        ids, size, before = self._ids, len(self._ids), self._before
        if size < MIN_MATCH or len(before) < size:
            return  # or it is not all in chains yet
        last, last_but_one = ids[-1], ids[-2]
        place = self._latest[(last_but_one * _SPREAD + last) & self._mask]
        for _ in range(MAX_CANDIDATES):
            if place < 0:
                break
            # A longer match than the longest one has, where that ends, what the sequence has there.
            is_longer = not best or (best < place and ids[place - 1 - best] == ids[size - 1 - best])
            if is_longer and ids[place - 1] == last and ids[place - 2] == last_but_one and ids[place] < MEDIA_ID_BASE:
                length, most = MIN_MATCH, min(place, MAX_MATCH)
                while length < most and ids[place - 1 - length] == ids[size - 1 - length]:
                    length += 1
                if length > best:
                    self._next, best = place, length
                    if best == MAX_MATCH:
                        break
            place = before[place]
        self.match_len = best
