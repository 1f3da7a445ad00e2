"""What prompts, conversations and other arguments may be; anything else is a ConfigError that says what is wanted."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.errors import ConfigError

DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
ONE = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(DEMO, cpu_infer=1, cache_lens=512, page_size=8) as made:
        yield made


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ((5, 6, 7), [[5, 6, 7]]),
        (range(5, 8), [[5, 6, 7]]),
        (np.array([5, 6, 7]), [[5, 6, 7]]),
        (np.array([5, 6, 7], dtype=np.uint16), [[5, 6, 7]]),
        (np.array([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        (torch.tensor([5, 6, 7]), [[5, 6, 7]]),
        (torch.tensor([5, 6, 7], dtype=torch.int32), [[5, 6, 7]]),
        (torch.tensor([[5, 6, 7]]), [[5, 6, 7]]),
        (torch.tensor([[5, 6], [7, 8]]), [[5, 6], [7, 8]]),
        ([np.array([5]), torch.tensor([6, 7]), [8]], [[5], [6, 7], [8]]),
        ([np.int64(5), np.int32(6)], [[5, 6]]),
        ([torch.tensor(5), torch.tensor(6)], [[5, 6]]),
        ([torch.tensor([[5, 6]]), [7]], [[5, 6], [7]]),
        ([[np.int64(5)], (6, 7)], [[5], [6, 7]]),
        (array.array("i", [5, 6]), [[5, 6]]),
        ({"prompt_token_ids": [5, 6]}, [[5, 6]]),
        ([{"prompt_token_ids": np.array([5, 6])}, {"prompt_token_ids": [7]}], [[5, 6], [7]]),
    ],
)
def test_ids_in_any_form(llm: LLM, prompts: Any, ids: list[list[int]]) -> None:
    found = llm.generate(prompts, ONE)
    assert [list(output.prompt_token_ids) for output in found] == ids
    assert all(type(one) is int for output in found for one in output.prompt_token_ids)


def test_text_in_a_dict_as_vllm_has_it(llm: LLM) -> None:
    assert llm.generate({"prompt": "Hello"}, ONE)[0].prompt_token_ids == llm.generate("Hello", ONE)[0].prompt_token_ids
    assert next(llm.stream(torch.tensor([5, 6]), ONE)).token_id == llm.generate([5, 6], ONE)[0].token_ids[0]


MESSAGE = {"role": "user", "content": "hi"}

Call = Callable[[LLM], object]

WRONG: list[tuple[Call, str]] = [
    # generate and stream
    (lambda llm: llm.generate(5), "prompts are a string, a list of token ids, or a list of those, got 5"),
    (lambda llm: llm.generate(None), "prompts are a string, .* got None"),
    (lambda llm: llm.generate(b"abc"), "prompts are a string, .* got b'abc'"),
    (lambda llm: llm.generate({5, 6}), "prompts are a string, .* got {5, 6}"),
    (lambda llm: llm.generate(x for x in "ab"), "prompts are a string"),
    (lambda llm: llm.generate([5.0, 6.0]), "a prompt is a string or a list of token ids, got 5.0"),
    (lambda llm: llm.generate([[5, 6.5]]), r"a prompt is .* got \[5, 6.5\]"),
    (lambda llm: llm.generate([[True, False]]), "a prompt is"),
    (lambda llm: llm.generate([["a"]]), "a prompt is"),
    (lambda llm: llm.generate([5, "a"]), "a prompt is"),
    (lambda llm: llm.generate(["a", 5]), "a prompt is a string or a list of token ids, got 5"),
    (lambda llm: llm.generate([b"abc"]), "a prompt is"),
    (lambda llm: llm.generate({"text": "a"}), "a prompt is .* or {\"prompt\": text}"),
    (lambda llm: llm.generate(np.array([1.5, 2.5])), "token ids are whole numbers, got an array of float64"),
    (lambda llm: llm.generate(torch.tensor([1.0])), "token ids are whole numbers, got an array of torch.float32"),
    (lambda llm: llm.generate(np.array([True])), "token ids are whole numbers, got an array of bool"),
    (lambda llm: llm.generate(np.array(5)), r"an array of one axis, .* shape \(\)"),
    (lambda llm: llm.generate(torch.zeros(1, 2, 3, dtype=torch.long)), r"shape \(1, 2, 3\)"),
    (lambda llm: llm.generate(["a", np.array(["b"])]), "token ids are whole numbers"),
    (lambda llm: llm.stream(5), "a prompt is a string or a list of token ids, got 5"),
    (lambda llm: llm.stream(["a", "b"]), "a prompt is"),
    (lambda llm: llm.stream(torch.tensor([[5, 6], [7, 8]])), "got an array of 2 rows"),
    (lambda llm: llm.generate(""), "the prompt is empty"),
    # sampling_params
    (lambda llm: llm.generate("a", 5), "sampling_params must be SamplingParams, got 5"),
    (lambda llm: llm.generate("a", "g"), "sampling_params must be SamplingParams, got 'g'"),
    (lambda llm: llm.generate("a", {"temperature": 0}), "may be given as keywords too"),
    (lambda llm: llm.generate("a", [5]), "sampling_params must be SamplingParams, got 5"),
    (lambda llm: llm.generate(["a", "b"], [ONE]), "1 sampling parameters for 2 prompts"),
    (lambda llm: llm.chat("a", SamplingParams), "sampling_params must be SamplingParams, got <class"),
    (lambda llm: llm.stream("a", 5), "sampling_params must be SamplingParams"),
    # chat
    (lambda llm: llm.chat(5), "a conversation is a string, or a list of messages: .* got 5"),
    (lambda llm: llm.chat(None), "a conversation is .* got None"),
    (lambda llm: llm.chat(b"hi"), "a conversation is"),
    (lambda llm: llm.chat([]), "a conversation needs at least one message"),
    (lambda llm: llm.chat([[]]), "a conversation needs at least one message"),
    (lambda llm: llm.chat(MESSAGE), "a conversation is .* got one message, .* put it in a list"),
    (lambda llm: llm.chat({MESSAGE["role"]}), "a conversation is"),
    (lambda llm: llm.chat([5]), "a conversation is .* got 5"),
    (lambda llm: llm.chat([None]), "a conversation is .* got None"),
    (lambda llm: llm.chat([[5]]), "a message is a dict with `role` and `content`, got 5"),
    (lambda llm: llm.chat([["hi"]]), "a message is a dict"),
    (lambda llm: llm.chat([MESSAGE, "hi"]), "a message is a dict .* got 'hi'"),
    (lambda llm: llm.chat([{"role": "user"}]), "the message, of the user, has no `content`"),
    (lambda llm: llm.chat([MESSAGE, {"role": "user", "content": None}]), "message 1 of 2 .* has no `content`"),
    (lambda llm: llm.chat([{"role": "assistant"}]), "of the assistant, has no `content`"),
    (lambda llm: llm.chat([{"content": "hi"}]), "the message has no `role`"),
    (lambda llm: llm.chat([{"role": 5, "content": "hi"}]), "has no `role`, or one that is no word"),
    (lambda llm: llm.chat([{"role": "user", "content": 5}]), "`content` of the message must be a string, .* got 5"),
    (lambda llm: llm.chat([{"role": "user", "content": [5]}]), "`content` of the message must be"),
    (lambda llm: llm.chat([{"role": "user", "content": {"text": "hi"}}]), "`content` of the message must be"),
    (lambda llm: llm.chat([MESSAGE], tools=5), "tools must be a list of dicts"),
    (lambda llm: llm.chat([MESSAGE], tools={"type": "function"}), "tools must be a list of dicts"),
    (lambda llm: llm.chat([MESSAGE], tools="f"), "tools must be a list of dicts"),
    (lambda llm: llm.chat([MESSAGE], tools=["f"]), "a tool is a dict with `type` and `function`, got 'f'"),
    # sessions
    (lambda llm: llm.save_session("/tmp/x", 5), "a prompt is a string or a list of token ids, got 5"),
    (lambda llm: llm.save_session("/tmp/x", "text"), "a session is a RequestOutput or a list of token ids"),
    (lambda llm: llm.save_session(5, [1, 2]), "path must be the name of a file, got 5"),
    (lambda llm: llm.load_session(5), "path must be the name of a file, got 5"),
    (lambda llm: llm.load_session(None), "path must be the name of a file"),
    (lambda llm: llm.continue_answer("x"), "a session to continue is what load_session returns, got 'x'"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_types_say_what_is_wanted(llm: LLM, number: int) -> None:
    call, says = WRONG[number]
    before = llm._batches.stats()  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=says):
        call(llm)
    assert llm._batches.stats() == before  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("keywords", "says"),
    [
        ({"model": 5}, "model must be a path or a name, got 5"),
        ({"gpu_memory": "20"}, "gpu_memory must be a number"),
        ({"cache_lens": "many"}, "cache_lens must be a whole number"),
        ({"cache_lens": 5.5}, "cache_lens must be a whole number"),
        ({"cpu_quant": 5}, "cpu_quant"),
        ({"kv_type": 5}, "kv_type"),
        ({"hot_experts": 5}, "hot_experts"),
        ({"cpu_memory_size_GB": "1"}, "cpu_memory_size_GB must be a number"),
        ({"kv_disk_path": 5}, "kv_disk_path must be a path"),
        ({"optimize_config_path": 5}, "optimize_config_path must be a path"),
        ({"tensor_parallel": "2"}, "tensor_parallel must be a whole number"),
        ({"pipeline": None}, "pipeline must be a whole number"),
        ({"max_batch_size": "4"}, "max_batch_size must be a whole number"),
        ({"page_size": True}, "page_size must be a whole number"),
        ({"use_cuda": "no"}, "use_cuda must be True or False"),
        ({"strict": 1}, "strict must be True or False"),
        ({"self_check": "off"}, "self_check must be True or False"),
        ({"prefix_cache": None}, "prefix_cache must be True or False"),
        ({"seed": "x"}, "seed must be a whole number"),
        ({"progress": 5}, "progress must be a function, got 5"),
        ({"profile": 5}, "profile must be a path"),
        ({"profile": "x", "profile_max_bytes": "1"}, "profile_max_bytes must be a whole number"),
        ({"attention_backend": 5}, "attention_backend"),
        ({"temperature": 0}, "LLM has no keyword temperature"),
    ],
)
def test_wrong_keywords_of_the_constructor(keywords: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        LLM(**({"model": DEMO, "cpu_infer": 1, "cache_lens": 64} | keywords))
