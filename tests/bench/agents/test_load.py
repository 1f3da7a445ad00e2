"""What is sent to a server, in which order, and what is made of its answers. No figure of time is looked at."""

from __future__ import annotations

from typing import Any

import pytest

from ktransformers.bench.agents.load import GroupTurn, Load, TimedAnswer, model_name
from ktransformers.bench.agents.report import label, percentile, row_of, shown_row
from ktransformers.bench.agents.shapes import WAVES, AgentGroup, Prompts, Wave, scaled
from ktransformers.bench.servers.client import RequestError
from tests.bench.agents.fake_server import AgentsHandler, waiting_handler
from tests.support.servers.fake_speed_server import http_server

PROMPTS = Prompts(1, vocab=1000)


def small(name: str) -> Wave:
    return scaled(next(wave for wave in WAVES if wave.name == name), 0.01)


def test_a_request_is_what_servers_of_all_makers_take() -> None:
    wave = Wave("a", (AgentGroup("", 1, own=5, answer=3),))
    with http_server(handler=AgentsHandler) as (client, bodies):
        assert model_name(client) == "demo"
        Load(client, "demo", PROMPTS).run(wave)
    assert bodies == [
        {
            "model": "demo",
            "prompt": PROMPTS.of(wave, wave.groups[0], 1)[0],
            "max_tokens": 3,
            "temperature": 0,
            "ignore_eos": True,
            "cache_prompt": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_turns_of_many_agents() -> None:
    wave = small("shared")
    with http_server(handler=AgentsHandler) as (client, bodies):
        first, second = Load(client, "demo", PROMPTS).run(wave)
    assert [len(body["prompt"]) for body in bodies] == [82] * 8 + [85] * 8  # turns do not mix
    assert (first.number, second.number) == (1, 2)
    assert [answer.error for answer in (*first.answers, *second.answers)] == [""] * 16
    assert {len(answer.token_times) for answer in first.answers} == {64}  # the event that ends an answer has no token
    row = row_of("ours", wave, second)
    assert (row["requests"], row["errors"]) == (8, 0)
    assert (row["prompt_tokens"], row["cached_tokens"], row["output_tokens"]) == (8 * 85, 8 * 42, 8 * 64)
    assert label(row) == "shared 2."


def test_a_prompt_comes_when_the_stream_has_its_tokens() -> None:
    handler = waiting_handler(held_len=300, held_at=32, other_len=8)
    with http_server(handler=handler) as (client, _):
        stream, prompt = Load(client, "demo", PROMPTS).run(small("beside"))
    assert handler.sent_before == [32]
    assert [answer.error for turn in (stream, prompt) for answer in turn.answers] == ["", ""]
    assert [answer.answer_len for turn in (stream, prompt) for answer in turn.answers] == [300, 8]
    assert label(row_of("ours", small("beside"), stream)) == "beside/stream"


def test_a_chat_comes_while_prompts_are_computed() -> None:
    prompts, chat = (
        AgentGroup("prompts", 2, own=4, answer=5),
        AgentGroup("chat", 1, own=1, answer=2, after_seconds=0.01),
    )
    handler = waiting_handler(held_len=5, held_at=0, other_len=2)
    with http_server(handler=handler) as (client, _):
        turns = Load(client, "demo", PROMPTS).run(Wave("behind", (prompts, chat)))
    assert handler.sent_before == [0]
    assert [[answer.error for answer in turn.answers] for turn in turns] == [["", ""], [""]]


@pytest.mark.parametrize("failing", [False, True])
def test_a_group_waits_no_longer_than_the_first_one_takes(failing: bool) -> None:
    first = AgentGroup("first", 1, own=4, answer=2)
    late = AgentGroup("late", 1, own=1, answer=1, after_seconds=100_000.0)
    never = AgentGroup("never", 1, own=1, answer=1, after_tokens=100_000)
    with http_server(handler=AgentsHandler, failing=failing) as (client, _):
        turns = Load(client, "demo", PROMPTS).run(Wave("a", (first, late, never)))
    assert [bool(turn.answers[0].error) for turn in turns] == [failing] * 3


def test_errors_are_counted_and_leave_the_sums_alone() -> None:
    class Refusing(AgentsHandler):
        refused_len = 9

    wave = Wave("a", (AgentGroup("long", 3, own=9, answer=4), AgentGroup("short", 2, own=6, answer=4)))
    with http_server(handler=Refusing) as (client, _):
        rows = [row_of("ours", wave, turn) for turn in Load(client, "demo", PROMPTS).run(wave)]
    assert [(row["requests"], row["errors"]) for row in rows] == [(3, 3), (2, 0)]
    long, short = rows
    assert (long["prompt_tokens"], long["output_tokens"], long["first_median_s"], long["gap_max_ms"]) == (
        0,
        0,
        None,
        None,
    )
    assert shown_row(long) == {"label": "a/long", "first": None, "gap": None}
    assert (short["prompt_tokens"], short["cached_tokens"], short["output_tokens"]) == (12, 6, 8)


class NoUsage(AgentsHandler):
    def usage(self, body: dict[str, Any]) -> None:
        return None


class OddUsage(AgentsHandler):
    def usage(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"total_tokens": 3}


@pytest.mark.parametrize(
    ("handler", "answer_len", "message"),
    [
        (NoUsage, 2, "the stream carries no usage"),
        (OddUsage, 2, "an event of the stream: KeyError('prompt_tokens')"),
        (AgentsHandler, 0, "the answer has no tokens"),
    ],
)
def test_answers_that_say_too_little_are_errors(handler: type[AgentsHandler], answer_len: int, message: str) -> None:
    wave = Wave("a", (AgentGroup("", 1, own=3, answer=answer_len),))
    with http_server(handler=handler) as (client, _):
        ((answer,),) = (turn.answers for turn in Load(client, "demo", PROMPTS).run(wave))
    assert answer.error.startswith(message)


class NoText(AgentsHandler):
    """As llama-server answers with tokens that are no text."""

    def send(self, event: dict[str, Any]) -> None:
        if not event["choices"] or event["choices"][0]["finish_reason"]:
            super().send(event)


def test_an_answer_without_text_has_its_end_as_first_token() -> None:
    wave = Wave("a", (AgentGroup("", 1, own=3, answer=16),))
    with http_server(handler=NoText) as (client, _):
        ((answer,),) = (turn.answers for turn in Load(client, "demo", PROMPTS).run(wave))
    assert (answer.error, answer.answer_len, len(answer.token_times), answer.gaps) == ("", 16, 1, [])
    assert answer.first > 0


def test_a_server_without_models_is_an_error() -> None:
    with pytest.raises(RequestError, match="pass --model_name"):
        model_name(FakeClient({"data": []}))  # type: ignore[arg-type]


class FakeClient:
    def __init__(self, answer: object) -> None:
        self.answer = answer

    def json(self, method: str, path: str) -> object:
        return self.answer


def test_figures_of_known_times() -> None:
    group = AgentGroup("", 2, own=10)
    answers = [
        TimedAnswer(10.0, [11.0, 11.5, 13.5], prompt_len=10, cached_len=4, answer_len=3),
        TimedAnswer(10.0, [14.0, 14.25], prompt_len=10, cached_len=None, answer_len=2),
        TimedAnswer(10.0, error="refused"),
    ]
    row = row_of("ours", Wave("a", (group,)), GroupTurn(group, 1, answers, 8.0))
    assert row == {
        "server": "ours",
        "wave": "a",
        "group": "",
        "turn": 1,
        "requests": 3,
        "errors": 1,
        "seconds": 8.0,
        "first_median_s": 2.5,
        "first_max_s": 4.0,
        "gap_median_ms": 500.0,
        "gap_p99_ms": 2000.0,
        "gap_max_ms": 2000.0,
        "prompt_tokens": 20,
        "cached_tokens": 4,
        "output_tokens": 5,
        "prompt_tokens_per_s": 2.0,
        "output_tokens_per_s": 0.62,
    }
    assert shown_row(row) == {"label": "a", "first": "2.50/4.00", "gap": "500.0/2000.0/2000.0"}


def test_cached_tokens_that_nobody_tells_are_unknown() -> None:
    group = AgentGroup("", 1, own=10)
    row = row_of("theirs", Wave("a", (group,)), GroupTurn(group, 1, [TimedAnswer(0.0, [1.0], 10, None, 1)], 2.0))
    assert (row["cached_tokens"], row["prompt_tokens_per_s"], row["gap_median_ms"]) == (None, 5.0, None)


def test_percentiles() -> None:
    hundred = [float(number) for number in range(100)]
    assert [percentile(hundred, share) for share in (0, 50, 99, 100)] == [0.0, 50.0, 99.0, 99.0]
    assert percentile([1.0], 99) == 1.0
