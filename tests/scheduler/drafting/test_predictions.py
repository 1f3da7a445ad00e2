"""Tokens that a request's sender expects of the answer: draft tokens come from there, too, and change no answer."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError, ContextLengthError
from ktransformers.scheduler.drafting.prompt_lookup import PromptLookup
from ktransformers.scheduler.limits import Limits
from tests.support.servers.fake_engine import Loop, answer_alone, make_config, make_request

CONFIG = make_config(num_pages=64, chunk_size=32, max_drafts=3)
IDS = st.lists(st.integers(0, 2), max_size=30)


@settings(deadline=None, max_examples=200)
@given(IDS, IDS, IDS)
def test_a_prediction_is_searched_as_if_it_stood_before_the_prompt(
    prediction: list[int], prompt: list[int], answer: list[int]
) -> None:
    lookup, joined = PromptLookup(prompt, None, prediction), PromptLookup(prediction + prompt)
    for number, token_id in enumerate([None, *answer]):
        if token_id is not None:
            lookup.extend([token_id])
            joined.extend([token_id])
        assert (lookup.match_len, lookup.draft(9)) == (joined.match_len, joined.draft(9))
        assert len(lookup) == len(prompt) + number  # the sequence's tokens alone


def steps_with(prediction: list[int], seed: int) -> tuple[list[int], int, int]:
    """(answer, steps, accepted draft tokens) of a request whose prompt says nothing of its answer."""
    loop = Loop(CONFIG)
    request = make_request("a", [30, 31, 32], 60, ignore_eos=True, seed=seed)
    loop.add(msgspec.structs.replace(request, prediction_ids=prediction))
    loop.drain()
    loop.check_answers()
    return loop.answers["a"], loop.scheduler._next_step - 1, loop.last["a"].num_accepted


def test_what_comes_as_predicted_takes_fewer_steps() -> None:
    seed = 3  # an odd one: the answer does not repeat itself
    alone, _ = answer_alone(make_request("a", [30, 31, 32], 60, ignore_eos=True, seed=seed), CONFIG)
    answer, steps, accepted = steps_with([], seed)
    assert answer == alone
    predicted, fewer, more = steps_with(alone, seed)
    assert predicted == alone
    assert more > accepted + 20
    assert fewer < steps - 20
    half, _, some = steps_with([*alone[:30], *reversed(alone[30:])], seed)
    assert half == alone
    assert accepted < some < more


def test_it_outlives_the_engine() -> None:
    """A request goes on with its prediction where the engine was lost."""
    alone, _ = answer_alone(make_request("a", [30, 31, 32], 60, ignore_eos=True, seed=3), CONFIG)
    loop = Loop(CONFIG)
    loop.add(
        msgspec.structs.replace(make_request("a", [30, 31, 32], 60, ignore_eos=True, seed=3), prediction_ids=alone)
    )
    for _ in range(8):
        loop.schedule()
        loop.commit()
    loop.crash()
    before = loop.scheduler.stats().num_accepted
    loop.drain()
    loop.check_answers()
    assert loop.scheduler.stats().num_accepted > before + 10


def test_it_is_bounded_as_a_prompt_is() -> None:
    limits, params = Limits(max_len=8, vocab_size=10, is_models_limit=True), SamplingParams()
    limits.check([1, 2], params, [9] * 7)
    with pytest.raises(ConfigError, match="the prediction has 8 tokens, and no answer has more than 7") as caught:
        limits.check([1, 2], params, [9] * 8)
    assert not isinstance(caught.value, ContextLengthError)  # a shorter conversation does not help
    with pytest.raises(ConfigError, match="the prediction names token 10"):
        limits.check([1, 2], params, [10])
    loop = Loop(CONFIG)
    with pytest.raises(ConfigError, match="the prediction"):
        loop.scheduler.add(msgspec.structs.replace(make_request("a", [1]), prediction_ids=[-1]))
