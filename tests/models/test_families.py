"""Every causal family of the installed transformers: a tiny random model agrees with it, or is refused as we say.

A new version of transformers that brings a family fails here by the family's name, until models/families.py has a line.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from docs.families import PAGE, families_text, page_with
from ktransformers.models.families import FAMILY_SUPPORT, Support
from tests.support.family_models import CAUSAL_TYPES
from tests.support.family_outcomes import check_family
from tests.support.products import thinned

RUNNING = [name for name in CAUSAL_TYPES if isinstance(FAMILY_SUPPORT.get(name), Support)]
VARIATIONS = range(3)


@pytest.mark.parametrize("model_type", CAUSAL_TYPES)
def test_a_family_agrees_or_is_refused_as_the_table_says(model_type: str, tmp_path: Path) -> None:
    check_family(model_type, tmp_path)


@pytest.mark.parametrize(("model_type", "seed"), thinned(itertools.product(RUNNING, VARIATIONS), strength=1))
def test_a_family_agrees_in_other_widths_too(model_type: str, seed: int, tmp_path: Path) -> None:
    check_family(model_type, tmp_path, seed)


def test_the_documentation_is_what_the_table_says() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page_with(families_text(), page) == page, "docs/models.md is older than the table; run `make families`"
