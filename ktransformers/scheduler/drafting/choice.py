"""Chooses how many draft tokens the rows of a step get, of chances and costs that are given. Pure.

    tokens of a sequence = 1 + sum of the chances that a draft token and those before it are accepted
    chosen               the draft tokens with which the product of all sequences' tokens / seconds is greatest

The product, not the sum: a step that is longer for the sake of some is longer for all, and what one answer gains by
drafts must be more, as a ratio, than what the others lose. Sequences with the same chances get as many.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

__all__ = ["MARGIN", "choose", "gains"]

MARGIN = 1.05
"""How many times as fast answers must become, in the mean: what is known of times and acceptance is not exact."""


_Group: TypeAlias = tuple[tuple[float, ...], bool]
"""Chances of a draft, and whether the engine has to find it: of one sequence or several."""


@lru_cache(maxsize=1024)
def gains(chances: tuple[float, ...]) -> tuple[float, ...]:
    """Return the logarithms of how many times as many tokens a sequence gets by each further draft token, of which the
    first 1, 2, ... are all right with these chances."""
    found, tokens = list[float](), 1.0
    for chance in chances:
        found.append(math.log1p(chance / tokens))
        tokens += chance
    return tuple(found)


def choose(
    chances: Sequence[tuple[float, ...]],
    costly: Sequence[bool],
    losses: Sequence[float],
    token_share: float = 0.0,
    *,
    in_block: bool = False,
) -> tuple[list[int], float]:
    """Return how many draft tokens each sequence gets, and the logarithm of how many times as fast all of them together
    become by these, 0 without any.

    chances, costly: of each sequence, those of its draft tokens, and whether the engine has to find them. losses: what
    0, 1, ... draft tokens lose, see RowCosts.losses; no more are run. token_share: what one more token of the longest
    draft that the engine finds takes, in plain steps; in_block: what all of them together take.
    """
    rows = len(chances)
    groups = Counter(zip(chances, costly, strict=True))
    most = math.fsum(num * sum(gains(key[0])) for key, num in groups.items())  # what all of them would gain
    best, depths = rows * math.log(MARGIN), dict[_Group, int]()
    if len(losses) < 2 or most - losses[1] <= best:
        return [0] * rows, 0.0
    drafts = [(one, -depth, key) for key in groups for depth, one in enumerate(gains(key[0]), 1)]
    drafts.sort(reverse=True)
    ways = [drafts]
    if any(costly):  # or only what takes no time to find
        ways.append([draft for draft in drafts if not draft[2][1]])
    for way in ways:
        num, gain, deepest, chosen = 0, 0.0, 0, 0
        for at, (one, depth, key) in enumerate(way, 1):
            num += groups[key]
            if num >= len(losses) or most - losses[num] <= best:
                break  # nor do more of them gain what they lose
            gain, loss = gain + groups[key] * one, losses[num]
            if key[1]:
                deepest = 1 if in_block else max(deepest, -depth)
            if deepest:
                loss = rows * math.log(math.exp(loss / rows) + deepest * token_share)
            if gain - loss > best:
                best, chosen = gain - loss, at
        if chosen:
            depths = {key: -depth for _, depth, key in way[:chosen]}
    return [depths.get(key, 0) for key in zip(chances, costly, strict=True)], best if depths else 0.0
