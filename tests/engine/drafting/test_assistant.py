"""Gemma 4's assistant drafts what transformers says that it does, and changes no answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.drafting.test_mtp import answers_of, check_engine, engine_of, loop_of
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.models.assistant_models import TARGETS, tiny_assistant, write_assistant, write_assistant_gguf


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_transformers(
    name: str, is_ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_assistant(name, is_ordered=is_ordered)
    target, assistant = write_assistant(tiny, tmp_path)
    with engine_of(target, speculative="draft", draft_model=assistant) as engine:
        check_engine(engine, tiny, monkeypatch)


@pytest.mark.parametrize("name", TARGETS)
def test_drafting_changes_no_answer(name: str, tmp_path: Path) -> None:
    target, assistant = write_assistant(tiny_assistant(name), tmp_path)
    with engine_of(target, speculative="off") as engine:
        plain = answers_of(loop_of(engine))
    with engine_of(target, speculative="draft", draft_model=assistant) as engine:
        loop = loop_of(engine)
        assert answers_of(loop) == plain
        assert loop.scheduler.stats().num_drafted > 100
        engine.executor.reset()
        assert answers_of(loop_of(engine, num_pages=8)) == plain


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_from_a_gguf(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no clusters."""
    tiny = tiny_assistant(name, is_ordered=True)
    target, _ = write_assistant(tiny, tmp_path)
    assistant = write_assistant_gguf(tiny, tmp_path / "assistant.gguf")
    tiny.assistant.config.use_ordered_embeddings = False
    with engine_of(target, speculative="draft", draft_model=assistant) as engine:
        check_engine(engine, tiny, monkeypatch)
