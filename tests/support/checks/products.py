"""Products of parameters: a few of them that cover all pairs for `make test`, every one for `make test-all`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pytest


def thinned(cases: Iterable[Sequence[Any]], strength: int = 2) -> list[Any]:
    """Parameters of a test: all `cases`, of which those that `make test` leaves out are marked `exhaustive`.

    Those that stay hold every combination of values of any `strength` parameters that `cases` hold: 1 for each value
    once, 2 for each pair. They are the same in every run: in the order of `cases`, always the next of those that add
    the most. Values are told apart by `repr`. Raises ValueError for cases with fewer parameters than `strength`.
    """
    rows = [tuple(case) for case in cases]
    if any(len(row) < strength for row in rows):
        raise ValueError(f"cases of fewer than {strength} parameters are not thinned")
    covers = [_combinations(row, strength) for row in rows]
    missing, chosen = set().union(*covers), set()
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(covers[i] & missing), -i))
        chosen.add(best)
        missing -= covers[best]
    return [
        pytest.param(*row, marks=() if i in chosen else pytest.mark.exhaustive, id="-".join(map(_name, row)))
        for i, row in enumerate(rows)
    ]


def product(strength: int = 2, **axes: Iterable[Any]) -> pytest.MarkDecorator:
    """Decorates a test with the thinned product of its parameters' values."""
    return pytest.mark.parametrize(list(axes), thinned(itertools.product(*axes.values()), strength))


def _combinations(row: tuple[Any, ...], strength: int) -> set[tuple[tuple[int, str], ...]]:
    return set(itertools.combinations([(at, repr(value)) for at, value in enumerate(row)], strength))


def _name(value: Any) -> str:
    """An id as pytest makes it, for the values that tests have."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(_name, value))
    if isinstance(value, Mapping):
        return ",".join(f"{key}={_name(one)}" for key, one in value.items())
    return str(getattr(value, "name", None) or getattr(value, "__name__", None) or value)
