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


@dataclass(frozen=True, slots=True)
class Shortened:
    """prompt_ids: of the turns that stayed. num_dropped: how many turns left."""

    prompt_ids: list[int]
    num_dropped: int


def prompt_room(max_len: int, max_tokens: int | None) -> int:
    """Most tokens of a prompt that leaves room for an answer in a context of max_len tokens, at least one.

    max_tokens: most tokens of the answer; None: as many as there is room for.
    """
    wanted = max(max_len // _ANSWER_PART, 1)
    return max(max_len - min(max_tokens or wanted, wanted), 1)


def shorten(
    roles: Sequence[str], sizes: Sequence[int], max_len: int, prompt_of: Callable[[Sequence[int]], list[int] | None]
) -> Shortened | None:
    """Leaves out the oldest turns until the prompt fits; None when it does not even without all that may leave.

    roles, sizes: of each turn; sizes are UTF-8 bytes, which only decide where turns leave together. max_len: tokens of
    the context. prompt_of: from the places of the turns that stay to the ids of their prompt, None for one that is too
    long; called at most some log2(len(roles)) times.
    """
    groups = _groups(roles)
    cuts = _cuts([sum(sizes[at] for at in group) for group in groups], max_len)
    tried: dict[int, list[int] | None] = {}

    def fits(cut: int) -> bool:
        dropped = {at for group in groups[:cut] for at in group}
        tried[cut] = prompt_of([at for at in range(len(roles)) if at not in dropped])
        return tried[cut] is not None

    found = bisect_left(cuts, True, key=fits)
    if found == len(cuts):
        return None
    prompt_ids = tried[cuts[found]]
    assert prompt_ids is not None
    return Shortened(prompt_ids, sum(map(len, groups[: cuts[found]])))


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
    """The error for a text of `what`, prompt_len tokens or more, where there is room for max_len."""
    return ContextLengthError(
        f"the text has {what}, and there is room for {max_len}: shorten it", prompt_len=prompt_len, max_len=max_len
    )
