"""Layers for multi-token prediction of further families draft what their reference implementations would, see
tests/support/models/mtp_families.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.mtp_engines import check_engine, engine_of
from tests.support.models.mtp_families import FAMILIES, tiny_family, write_family


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_drafts_are_those_of_the_reference(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_family(model_type, count=1)
    with engine_of(write_family(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch)
