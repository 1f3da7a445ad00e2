"""Keywords of chat, generate and stream: fields of SamplingParams, variables of the template, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.async_llm import AsyncLLM
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.sequence.keywords import SamplingKeywords, split_keywords
from ktransformers.errors import ConfigError, UnsupportedError

DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
QUESTION = "What is 17 + 25?"
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, cpu_infer=1, cache_lens=1024, max_batch_size=4, page_size=8) as made:
        yield made


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with LLM.from_engine(build_engine(EngineConfig(gguf_path=DEMO, cpu_infer=1, cache_lens=512))) as made:
        yield made


def test_every_field_of_sampling_params_is_a_keyword() -> None:
    assert set(SamplingKeywords.__annotations__) == {one.name for one in fields(SamplingParams)}


@pytest.mark.parametrize(
    ("given", "keywords"),
    [
        (None, {"max_tokens": 3}),
        (None, {"max_tokens": 5, "temperature": 0.8, "seed": 3}),
        (GREEDY, {"max_tokens": 4}),
        (SamplingParams(temperature=1.1, seed=5), {"max_tokens": 6, "min_tokens": 2, "stop": "zzz"}),
        (GREEDY, {"stop_token_ids": [3], "logprobs": 2, "skip_special_tokens": False}),
        (GREEDY, {"logit_bias": {7: 5.0}, "repetition_penalty": 1.3, "ignore_eos": True}),
        (GREEDY, {"guided_choice": ["yes", "no"]}),
        (GREEDY, {"constraint": {"regex": "[a-f]+"}, "max_tokens": 5}),
    ],
)
def test_keywords_are_the_same_as_parameters(
    llm: LLM, alone: LLM, given: SamplingParams | None, keywords: dict[str, Any]
) -> None:
    """The oracle is the same call with SamplingParams made by hand."""
    wanted = replace(given or llm.default_params, **keywords)
    for asked in (llm, alone):
        params = (
            wanted if wanted.seed is not None else replace(wanted, seed=asked.chat(QUESTION, wanted)[0].params.seed)
        )
        fixed = {"seed": params.seed} | keywords
        assert asked.chat(QUESTION, given, **fixed)[0].token_ids == asked.chat(QUESTION, params)[0].token_ids
        assert asked.generate(QUESTION, given, **fixed)[0].text == asked.generate(QUESTION, params)[0].text
        streams = [list(asked.stream(QUESTION, given, **fixed)), list(asked.stream(QUESTION, params))]
        assert [event.token_id for event in streams[0]] == [event.token_id for event in streams[1]]


def test_keywords_hold_for_each_of_several(llm: LLM) -> None:
    found = llm.generate(["One", "Two"], [GREEDY, replace(GREEDY, max_tokens=9)], max_tokens=2, ignore_eos=True)
    assert [len(output.token_ids) for output in found] == [2, 2]


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("chat", {"max_tokens": 3, "temperture": 9}, "chat has no keyword temperture, .* did you mean temperature"),
    ("generate", {"temprature": 0.5}, "generate has no keyword temprature, .* did you mean temperature"),
    ("stream", {"max_new_tokens": 3}, "stream has no keyword max_new_tokens, .* did you mean max_tokens"),
    ("stream", {"topk": 3}, "did you mean top_k"),
    ("chat", {"stop_strings": ["a"]}, "chat has no keyword stop_strings"),
    ("chat", {"enable_thinkin": True}, "no variable of the model's chat template"),
    ("chat", {"chat_template_kwargs": {"wombat": 1}}, "chat has no keyword wombat"),
    ("chat", {"chat_template_kwargs": 5}, "chat_template_kwargs must be a dict"),
    ("chat", {"special_tokens_in_contents": True}, "did you mean special_tokens_in_content"),
    ("chat", {"tokenize": False}, "tokenize is no keyword of chat: it is set here"),
    ("chat", {"max_len": 5}, "max_len is no keyword of chat: it is set here"),
    ("generate", {"enable_thinking": False}, "generate has no keyword enable_thinking"),
    ("generate", {"on_prefill": print}, "generate has no keyword on_prefill"),
    ("generate", {"use_tqdm": True}, "use_tqdm=True is not supported: there is no bar"),
    ("generate", {"lora_request": "x"}, "LoRA adapters are not supported here"),
    ("generate", {"temperature": -1}, "temperature must be at least 0"),
    ("chat", {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
    ("chat", {"n": 0}, "n must be at least 1"),
    ("generate", {"n": 1.5}, "n must be a whole number"),
    ("stream", {"n": 2}, "a stream is one answer"),
    ("stream", {"should_stop": 5}, "should_stop must be a function, got 5"),
]


@pytest.mark.parametrize(("method", "keywords", "says"), WRONG)
def test_what_is_no_keyword_is_an_error(llm: LLM, method: str, keywords: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        getattr(llm, method)(QUESTION, **keywords)


def test_asynchronous_answers_say_the_same(llm: LLM) -> None:
    async def run() -> None:
        async with AsyncLLM(DEMO, cpu_infer=1, cache_lens=1024, page_size=8) as served:
            for method, keywords, says in WRONG:
                if method == "stream" or keywords.keys() & {"should_stop"}:
                    continue
                with pytest.raises(ConfigError, match=says):
                    await getattr(served, method)(QUESTION, **keywords)
            wanted = llm.chat(QUESTION, GREEDY, max_tokens=5)[0]
            assert (await served.chat(QUESTION, GREEDY, max_tokens=5)).token_ids == wanted.token_ids
            assert len((await served.generate(QUESTION, GREEDY, ignore_eos=True, max_tokens=3)).token_ids) == 3
            await check_samples(served)
            assert (await served.get_tokenizer())("hello")["input_ids"] == llm.tokenizer.encode("hello")

    async def check_samples(served: AsyncLLM) -> None:
        params = SamplingParams(temperature=1.5, seed=11, max_tokens=8, n=3)
        ours = await served.generate("Once", params)
        theirs = llm.generate("Once", params)[0]
        assert [one.token_ids for one in ours.outputs] == [one.token_ids for one in theirs.outputs]
        with pytest.raises(UnsupportedError, match="with n, await all"):
            async for _ in served.generate("Once", n=2):
                pass
        with pytest.raises(UnsupportedError, match="request_id names one answer"):
            served.generate("Once", request_id="a", n=2)
        with pytest.raises(ConfigError, match="the prompt is empty"):
            await served.generate([], n=2)

    asyncio.run(run())


def test_variables_of_the_template() -> None:
    """By a template of our own: the bundled model's reads none that a caller would set."""

    class Fake:
        has_chat_template = True
        backend = type(
            "Backend", (), {"chat_template": "{{ messages }}{% if enable_thinking %}{{ thinking_budget }}{% endif %}"}
        )

    fake: Any = Fake()
    keywords = {"enable_thinking": False, "temperature": 0.5, "chat_template_kwargs": {"thinking_budget": 3}}
    assert split_keywords("chat", keywords, fake) == (
        {"temperature": 0.5}, {"enable_thinking": False, "thinking_budget": 3},
    )  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean enable_thinking"):
        split_keywords("chat", {"enable_thinkng": False}, fake)
    Fake.backend.chat_template = {"default": "{{ messages }}", "tool_use": "{{ documents }}"}
    assert split_keywords("chat", {"documents": []}, fake)[1] == {"documents": []}
    Fake.backend.chat_template = "{% not a template"  # rendering says what is wrong with it
    assert split_keywords("chat", {"anything": 1}, fake)[1] == {"anything": 1}
    with pytest.raises(ConfigError, match="did you mean city"):
        split_keywords("chat", {"chat_template": "{{ city }}", "citi": 1}, fake)


# --- several answers to one prompt -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", ["llm", "alone"])
def test_n_answers_to_each_prompt(make: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(make)
    params = SamplingParams(temperature=1.5, seed=11, max_tokens=8, n=3)
    found = llm.generate(["Once", "Twice"], params)
    assert [len(output.outputs) for output in found] == [3, 3]
    for output, prompt in zip(found, ["Once", "Twice"], strict=True):
        assert output.outputs[0].text == output.text
        assert [one.index for one in output.outputs] == [0, 1, 2]
        assert len({one.token_ids for one in output.outputs}) > 1
        for index, one in enumerate(output.outputs):  # answer i is what the prompt gives alone with seed + i
            single = llm.generate(prompt, replace(params, n=1, seed=11 + index))[0]
            assert (one.token_ids, one.params) == (single.token_ids, single.params)
            assert single.outputs == (single,)
    assert "2 others" in repr(found[0])
    (chatted,) = llm.chat(QUESTION, n=2, temperature=0, max_tokens=4)
    assert len({one.token_ids for one in chatted.outputs}) == 1
    assert len({one.params.seed for one in llm.generate("Once", n=4, temperature=1.0, max_tokens=1)[0].outputs}) == 4


def test_the_hugging_face_tokenizer(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "Hi" in str(rendered)
    assert tokenizer.encode("hello") == llm.tokenizer.encode("hello")


CLOSED: list[Callable[[LLM], object]] = [
    lambda llm: llm.chat("a", temperture=1),
    lambda llm: llm.generate("a", max_tokens=1),
    lambda llm: llm.stream("a"),
]


@pytest.mark.exhaustive
def test_a_closed_model_is_said_first() -> None:
    llm = LLM(DEMO, cpu_infer=1, cache_lens=64)
    llm.close()
    for use in CLOSED:
        with pytest.raises(RuntimeError, match="this LLM is closed"):
            use(llm)
