"""What the log says of loading, of load and of the end; the clock is the test's."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

from ktransformers.core import CAPTURING, FinishReason, GenerationStats, SamplingParams, TokenEvent
from ktransformers.server.backend.base import BackendStats, GenerationRequest
from ktransformers.server.telemetry.activity import LoadingLog, LoadSummary, duration, farewell, watch_loading
from ktransformers.server.telemetry.metrics import Counts, Metrics
from ktransformers.server.telemetry.request_metrics import RequestMetrics
from tests.support.servers.fake_backend import FakeBackend


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _at_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ktransformers.server")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.04, "0.0 s"),
        (59.9, "59.9 s"),
        (60, "1 min 0 s"),
        (245.9, "4 min 5 s"),
        (3600, "1 h 0 min"),
        (11_560, "3 h 12 min"),
        (183_600, "2 d 3 h"),
    ],
)
def test_durations(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_a_summary_has_the_rates_since_the_last_one() -> None:
    backend, counts, clock = FakeBackend(), Counts(), Clock()
    summary = LoadSummary(backend, counts, clock)
    clock.now += 10
    assert summary.line() is None  # nobody asked for anything
    backend.now = BackendStats(3, 2, 0.415)
    counts.prompt_tokens, counts.answer_tokens = 8120, 961
    clock.now += 10
    expected = "3 running, 2 waiting, 812.0 prompt tokens/s, 96.1 generated tokens/s, cache 42% used"
    assert summary.line() == expected
    clock.now += 10
    assert summary.line() == "3 running, 2 waiting, 0.0 prompt tokens/s, 0.0 generated tokens/s, cache 42% used"
    backend.now = BackendStats(0, 0, 0.4)
    counts.answer_tokens += 10
    clock.now += 5
    assert summary.line() == "0 running, 0 waiting, 0.0 prompt tokens/s, 2.0 generated tokens/s, cache 40% used"
    clock.now += 10
    assert summary.line() is None
    counts.draft_tokens, counts.accepted_tokens = 12, 9
    clock.now += 10
    rates = "0.0 prompt tokens/s, 0.0 generated tokens/s, 9 of 12 draft tokens accepted"
    assert summary.line() == f"0 running, 0 waiting, {rates}, cache 40% used"


def test_a_summary_is_logged_when_busy_only(caplog: pytest.LogCaptureFixture) -> None:
    backend = FakeBackend()
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            backend.now = BackendStats(1, 0)
        if len(waits) == 4:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(LoadSummary(backend, Counts(), Clock()).run(sleep))
    assert waits == [10.0] * 4
    assert [record.getMessage().split(",")[0] for record in caplog.records] == ["1 running", "1 running"]


def test_loading_is_told_in_quarters(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = LoadingLog("big-model", clock)
    gib = 1 << 30
    for done in (0, 1, 2, 3, 6, 7, 8):
        log(done * gib, 8 * gib, "model.layers.0")
        clock.now += 2
    log(1, 5, CAPTURING)
    log(2, 5, CAPTURING)
    assert caplog.messages == [
        "loading big-model",
        "big-model has 8.0 GiB of weights",
        "loaded 25 %, 2.0 GiB of 8.0 GiB, after 4.0 s",
        "loaded 75 %, 6.0 GiB of 8.0 GiB, after 8.0 s",
        "capturing 5 CUDA graphs",
    ]


def test_a_bar_replaces_the_lines(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[int] = []
    watch_loading("m", lambda done, total, name: seen.append(done))(1, 2, "x")
    assert (seen, caplog.messages) == ([1], [])


def test_the_last_line() -> None:
    counts = Counts(num_started=122, num_finished=120, prompt_tokens=9000, answer_tokens=5000)
    assert farewell(signal.SIGTERM, counts, 11_560) == (
        "stopped (SIGTERM) after 3 h 12 min: 120 answers finished, 2 cut off, 9000 prompt tokens read, "
        "5000 tokens generated"
    )
    assert farewell("by an error: EngineError", Counts(), 1).startswith(
        "stopped (by an error: EngineError) after 1.0 s"
    )


def test_answers_are_counted_as_they_come() -> None:
    metrics = Metrics(FakeBackend(), "m")
    request = GenerationRequest(request_id="a", prompt_ids=(1, 2, 3, 4, 5), params=SamplingParams(seed=1))
    request_metrics = RequestMetrics([request, request], 2, metrics)
    stats = GenerationStats(prompt_len=5, cached_len=2)
    request_metrics.note(0, TokenEvent(7, "", stats))
    request_metrics.note(0, TokenEvent(8, "", stats, finish_reason=FinishReason.STOP))
    request_metrics.note(1, TokenEvent(None, "", stats, finish_reason=FinishReason.ABORT))
    assert metrics.counts == Counts(num_started=2, num_finished=1, prompt_tokens=3, answer_tokens=2)
