"""Chooses which of a conversation's oldest turns leave when it is longer than the context.

Works on roles and sizes alone; whoever calls it renders and counts. Instructions (system and developer turns) and the
last question with the latest exchange behind it stay. Turns leave together with their answers, calls and results, in
large groups whose borders do not depend on what comes later: the prompts of the next turns begin as this one does, so
that prefix pages are found again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ktransformers.errors import ContextLengthError

__all__ = ["Shortened", "prompt_room", "shorten", "text_too_long"]

_INSTRUCTIONS = frozenset({"system", "developer"})
_ANSWER_PART = 8
"""An answer wants a part in so many of the context, or max_tokens if that is less."""


PromptOf = Callable[[Sequence[int]], "list[int] | int"]
"""From the places of the turns that stay to the ids of their prompt; of one that is too long how many tokens it has, or
has at least."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """A conversation that was shortened. prompt_ids: of the turns that stayed. num_dropped: how many turns left."""

    prompt_ids: list[int]
    num_dropped: int


def prompt_room(max_len: int, max_tokens: int | None) -> int:
    """Return the most tokens of a prompt that leaves room for an answer in a context of max_len tokens, at least one.

    max_tokens: most tokens of the answer; None: as many as there is room for.
    """
    wanted = max(max_len // _ANSWER_PART, 1)
    return max(max_len - min(max_tokens or wanted, wanted), 1)


def shorten(
    roles: Sequence[str], sizes: Sequence[int], max_len: int, whole_len: int, limit: int, prompt_of: PromptOf
) -> Shortened | None:
    """Leave out the oldest turns until the prompt fits; None when it does not even without all that may leave.

    roles, sizes: of each turn; sizes are UTF-8 bytes, which decide where turns leave together, and what is tried first.
    max_len: tokens of the context. whole_len: of the prompt of all turns, about; limit: most that a prompt may have.
    prompt_of is called some four times, and at most some 2 * log2(len(roles)) times where sizes say little of tokens.
    """
    groups = _groups(roles)
    cuts = _cuts([sum(sizes[at] for at in group) for group in groups], max_len)
    dropped = [0, *accumulate(sum(sizes[at] for at in group) for group in groups)]
    left = [sum(sizes) - dropped[cut] for cut in cuts]
    best: list[int] = []

    def probe(at: int) -> tuple[int, bool]:
        nonlocal best
        gone = {place for group in groups[: cuts[at]] for place in group}
        made = prompt_of([place for place in range(len(roles)) if place not in gone])
        if isinstance(made, int):
            return made, False
        best = made  # each that fits has more turns than the one before
        return len(made), True

    found = _first_that_fits(left, (whole_len, sum(sizes)), limit, probe)
    return None if found == len(cuts) else Shortened(best, sum(map(len, groups[: cuts[found]])))


def _first_that_fits(
    left: Sequence[int], whole: tuple[int, int], limit: int, probe: Callable[[int], tuple[int, bool]]
) -> int:
    """The first place whose prompt fits, where all later ones do; len(left): none does.

    left: bytes that stay at each place. whole: tokens and bytes of all. limit: tokens. probe: tokens of a place's
    prompt, and whether it fits. Two places are guessed by the tokens for each byte, of the whole and then of the first
    guess. From the second one on the search goes on in growing steps, until it has passed the border.
    """
    low, high, fits = 0, len(left), False
    tokens, nbytes = whole
    for _ in range(2):
        if low == high:
            return low
        room = nbytes * limit / max(tokens, 1)
        at = min(max(bisect_left(left, -room, key=lambda size: -size), low), high - 1)
        (tokens, fits), nbytes = probe(at), left[at]
        low, high = (low, at) if fits else (at + 1, high)
    goes_down, step = fits, 1
    while low < high:
        if fits is goes_down:
            at = max(high - step, low) if goes_down else min(low + step - 1, high - 1)
        else:
            at = (low + high) // 2
        now = probe(at)[1]
        low, high = (low, at) if now else (at + 1, high)
        fits, step = (now, 2 * step) if fits is goes_down else (fits, step)
    return low


def _groups(roles: Sequence[str]) -> list[list[int]]:
    """Places of turns that leave together, the oldest first; what always stays is in none of them.

    Before the last question a group begins with each question; behind it, with each answer, and the latest one stays.
    """
    question = max((at for at, role in enumerate(roles) if role == "user"), default=-1)
    latest = max((at for at, role in enumerate(roles) if role == "assistant"), default=-1)
    groups: list[list[int]] = []
    for at, role in enumerate(roles):
        if role in _INSTRUCTIONS or at == question:
            continue
        if at > question and at >= latest:
            break
        begins = role == ("user" if at < question else "assistant")
        if begins or not groups or (at > question > groups[-1][0]):
            groups.append([])
        groups[-1].append(at)
    return groups


def _cuts(sizes: Sequence[int], max_len: int) -> list[int]:
    """How many groups may leave: those whose bytes pass a multiple of about a quarter of the context; then, as a last
    resort, as many groups as there are behind the last of these."""
    step = max(max_len, 1)  # bytes: a token has some four
    passed = [total // step for total in accumulate(sizes)]
    coarse = [at + 1 for at in range(len(passed)) if passed[at] > (passed[at - 1] if at else 0)]
    rest = range((coarse[-1] if coarse else 0) + 1, len(sizes) + 1)
    return [*coarse, *rest]


def text_too_long(what: str, prompt_len: int, max_len: int) -> ContextLengthError:
    """Return the error for a text of `what`, prompt_len tokens or more, where there is room for max_len."""
    return ContextLengthError(
        f"the text has {what}, and there is room for {max_len}: shorten it", prompt_len=prompt_len, max_len=max_len
    )
