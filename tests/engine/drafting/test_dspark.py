"""DeepSeek's DSpark head drafts what its formulas say, a block in each pass, and no answer depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.mtp_engines import check_engine, engine_of
from tests.support.models.dspark import tiny_dspark, write_dspark


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many tokens as may be are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


def test_drafts_are_those_of_the_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_dspark()
    with engine_of(write_dspark(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)
