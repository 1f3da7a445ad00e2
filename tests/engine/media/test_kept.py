"""What is kept of pictures outlives the engine, in files and sessions; draft models are shown tokens in their place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from ktransformers.core import SamplingParams
from ktransformers.engine.api.batch_loop import EngineRequest
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.sequence.partial import PartialGeneration
from ktransformers.engine.step.drafts import ComputedRow, DraftRequest
from ktransformers.media.records import is_media_id
from ktransformers.scheduler.records import Request
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.picture_engines import IMAGE_TOKEN, picture_composite, picture_engine
from tests.support.engines.tiered_service import Service

PARAMS = SamplingParams(temperature=0.9, seed=7, max_tokens=24, ignore_eos=True, max_drafts=0)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5_moe"])
def test_the_next_service_finds_pictures_in_files(name: str, tmp_path: Path) -> None:
    engine, pictures = picture_engine(picture_composite(name), tmp_path / "model")
    files = tmp_path / "files"
    files.mkdir()
    with closing(engine):
        prompt = pictures.prompt(list(range(10, 20)), pictures.picture("a", 6, 8), list(range(30, 80)))
        first = Service(engine, files)
        want, _ = first.answer(prompt.ids, media=prompt.media)
        first.close()
        pictures.asked.clear()
        second = Service(engine, files)
        got, rows = second.answer(prompt.ids, media=prompt.media)
        assert (got, pictures.asked) == (want, [])
        assert rows < len(prompt.ids)
        second.close()


def test_a_session_goes_on_with_the_same_tokens(tmp_path: Path) -> None:
    engine, pictures = picture_engine(picture_composite("qwen3_vl"), tmp_path / "model")
    prompt = pictures.prompt([5, 9, 17], pictures.picture("a", 3, 4), list(range(20, 40)))
    with LLM.from_engine(engine) as llm:
        events = list(
            prefill_and_generate(
                llm._batches, EngineRequest(Request(prompt_ids=prompt.ids, params=PARAMS, media=prompt.media))
            )
        )
        answer = [event.token_id for event in events]
        begun = PartialGeneration(prompt.ids, PARAMS, answer[:9], prompt.media)
        saved = llm.save_session(tmp_path / "session", begun)
        assert saved.media == tuple(prompt.media)
    again, others = picture_engine(picture_composite("qwen3_vl"), tmp_path / "model")
    others.pictures = pictures.pictures
    with LLM.from_engine(again) as llm:
        loaded = llm.load_session(tmp_path / "session")
        assert (loaded.media, loaded.cached_len) == (tuple(prompt.media), saved.cached_len)
        assert [event.token_id for event in llm.continue_answer(loaded)] == answer[9:]
        assert others.asked == []
        begun = PartialGeneration(prompt.ids, PARAMS, answer[:9])
        with pytest.raises(ValueError, match="token ids must be in"):
            llm.save_session(tmp_path / "other", begun)


class Noting:
    """A drafter that drafts zeros, and notes what it is shown."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def draft(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        self.seen += [one.token_id for one in requests]
        return [[0] * one.num_drafts for one in requests]

    def observe(self, rows: Sequence[ComputedRow]) -> None:
        for row in rows:
            self.seen += [*row.token_ids, row.next_id]

    def end(self, runs: Sequence[tuple[int, np.ndarray]]) -> None:
        pass

    def reset(self) -> None:
        pass


def test_a_drafter_is_shown_tokens(tmp_path: Path) -> None:
    engine, pictures = picture_engine(picture_composite("qwen3_vl"), tmp_path)
    with closing(engine):
        prompt = pictures.prompt([5, 9, 17], pictures.picture("a", 3, 4), [20, 21])
        drafter = Noting()
        answers = []
        for drafts in (0, 3):
            engine.executor.drafter = drafter if drafts else None
            config = scheduler_config(engine, chunk_size=7, max_drafts=drafts, drafter="draft" if drafts else "ngram")
            loop = PagedLoop(config, lambda: engine.executor)
            params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
            name = loop.add(prompt.ids, params, media=prompt.media, cache_salt=str(drafts))
            loop.drain()
            answers.append(loop.answers[name].token_ids)
        assert answers[0] == answers[1]
        assert not any(map(is_media_id, drafter.seen))
        assert drafter.seen.count(engine.executor.pictures.family.token_id) >= 12  # type: ignore[union-attr]
        assert pictures.family.token_id == IMAGE_TOKEN
