"""Profiles of steps with draft tokens: several tokens of one request in one step, and counts of each request."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.profiling.tables import load
from ktransformers.profiling.trace import write_trace
from ktransformers.scheduler.drafting.account import Account
from ktransformers.scheduler.drafting.row_costs import RowCosts
from ktransformers.server.backend.base import GenerationRequest
from ktransformers.server.backend.interfaces.ktransformers import KTransformersInterface
from ktransformers.server.backend.profiler import ProfileConfig
from tests.support.checks.profiles import check_answers, check_nothing_lost, check_sums, read_profile
from tests.support.models.demo import DEMO_GGUF

PARAMS = SamplingParams(temperature=0, max_tokens=60, seed=1, ignore_eos=True)


@pytest.fixture(autouse=True)
def rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever may be drafted is, on any machine."""
    monkeypatch.setattr(RowCosts, "knows", lambda self, rows: True)
    monkeypatch.setattr(RowCosts, "seconds", lambda self, rows, more=0: 1.0)
    monkeypatch.setattr(RowCosts, "is_stale", lambda self, rows: False)
    monkeypatch.setattr(RowCosts, "losses", lambda self, rows: [0.0] * (1 + self._most - rows))
    monkeypatch.setattr(Account, "is_awake", lambda self, now: True)


def answers(folder: Path, speculative: str, *asked: GenerationRequest) -> list[list[TokenEvent]]:
    async def work() -> list[list[TokenEvent]]:
        config = EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=512, speculative=speculative)
        made = KTransformersInterface(config, ProfileConfig(folder))
        await made.start()
        try:
            assert made.model.max_drafts == (0 if speculative == "off" else config.speculative_tokens)
            return [[event async for event in made.inference(one)] for one in asked]
        finally:
            await made.close()

    return asyncio.run(work())


def test_each_token_has_its_line_and_each_request_its_counts(tmp_path: Path) -> None:
    plain = GenerationRequest(request_id="plain", prompt_ids=(5, 6, 7, 8), params=PARAMS)
    (events,) = answers(tmp_path / "off", "off", plain)
    ids = tuple(event.token_id for event in events if event.token_id is not None)
    none = replace(plain, request_id="none", params=replace(PARAMS, max_drafts=0))
    wrong = (*ids[:30], (ids[30] + 1) % 100, *ids[31:])  # at one place
    told = replace(plain, request_id="told", prediction_ids=wrong)
    drafted = answers(tmp_path / "p", "ngram", none, told)
    assert [[event.token_id for event in one if event.token_id is not None] for one in drafted] == [list(ids)] * 2
    stats = [one[-1].stats for one in drafted]
    assert (stats[0].num_drafted, stats[0].num_accepted) == (0, 0)
    assert stats[1].num_drafted > stats[1].num_accepted >= 40

    profile = read_profile(tmp_path / "p")
    check_answers(profile, {"none": ids, "told": ids})
    check_sums(profile)
    check_nothing_lost(profile)
    for line, one in zip(profile.requests, stats, strict=True):
        assert (line["num_drafted"], line["num_accepted"]) == (one.num_drafted, one.num_accepted)
    steps = {step["step"]: step for step in profile.steps}
    num_steps = {
        name: len({one["step"] for one in profile.tokens if one["request"] == name}) for name in ("none", "told")
    }
    assert num_steps == {"none": 60, "told": 60 - stats[1].num_accepted}
    for number, step in steps.items():
        mine = [one for one in profile.tokens if one["step"] == number]
        assert step["sampled"] == len(mine)
        assert len({one["t"] for one in mine}) <= 1
        assert [one["ms"] for one in mine[1:]] == [0.0] * (len(mine) - 1)
    assert max(step["sampled"] for step in profile.steps) > 2
    # A token has the experts of its own row: those that the same token has where it is computed alone.
    experts = {name: [one["experts"] for one in profile.tokens if one["request"] == name] for name in num_steps}
    assert experts["told"][4:] == experts["none"][4:]  # the first are behind what the cache has

    table = load(tmp_path / "p").requests.read("num_drafted", "num_accepted")
    assert table["num_accepted"].tolist() == [0, stats[1].num_accepted]
    write_trace(load(tmp_path / "p"), tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text().count('"num_accepted"') == 1


def test_a_request_has_no_tokens_behind_its_stop_string(tmp_path: Path) -> None:
    """Which a step may have accepted together with those before it."""
    drawn = replace(PARAMS, temperature=1.0)  # it repeats nothing
    plain = GenerationRequest(request_id="plain", prompt_ids=(5, 6, 7, 8), params=drawn)
    (events,) = answers(tmp_path / "off", "off", plain)
    ids = tuple(event.token_id for event in events if event.token_id is not None)
    text = "".join(event.text for event in events)
    stop = next(text[at:][:4] for at in range(20, len(text)) if text.find(text[at:][:4]) == at)  # not there before
    params = replace(drawn, stop=(stop,))
    (stopped,) = answers(tmp_path / "p", "ngram", replace(plain, request_id="s", params=params, prediction_ids=ids))
    given = [event.token_id for event in stopped if event.token_id is not None]
    assert given == list(ids[: len(given)])
    profile = read_profile(tmp_path / "p")
    assert [line["completion_len"] for line in profile.requests] == [len(given)]
    assert len(profile.answers()["s"]) > len(given)  # computed, and of no use
