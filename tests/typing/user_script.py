"""What a user may write, for mypy --strict: every line here has to pass. Never run; see test_typing.py."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import assert_type

from ktransformers import LLM, AsyncLLM, RequestOutput, SamplingParams, TokenEvent
from ktransformers.errors import ConfigError, KTransformersError


def offline() -> None:
    with LLM() as llm:
        assert_type(llm, LLM)
        assert_type(llm.chat("What is 17 + 25?"), list[RequestOutput])
        assert_type(llm.chat("What is 17 + 25?")[0].text, str)
        assert_type(llm.generate([[1, 2, 3], [4]], [SamplingParams(seed=1), SamplingParams()]), list[RequestOutput])
        assert_type(llm.stream([1, 2, 3], should_stop=lambda: False), Iterator[TokenEvent])
        assert_type(llm.generate("one")[0].token_ids, tuple[int, ...])
        assert_type(llm.default_params, SamplingParams)
        assert_type(llm.max_len, int)
        llm.chat([{"role": "user", "content": "hi"}], enable_thinking=False)
        llm.chat(["one", "two"], SamplingParams(temperature=0, stop=("\n",)))
        llm.generate({"prompt_token_ids": [1, 2]}, temperature=0.5, max_tokens=3)
        assert_type(llm.chat("one", n=2)[0].outputs, tuple[RequestOutput, ...])
    LLM("model.gguf", cache_lens=8192, gpu_memory=20.0, max_batch_size=8)
    LLM(model="org/name:Q4_K_M", max_model_len=4096, tensor_parallel_size=1, dtype="auto", seed=3)
    LLM(Path("folder"), gguf_path="weights.gguf", optimize_config_path="rules.yaml", progress=print)
    try:
        LLM(gguf_path="missing.gguf")
    except ConfigError as error:
        assert_type(error, ConfigError)
        raise KTransformersError(str(error)) from error


async def concurrent() -> None:
    async with AsyncLLM("model.gguf", max_num_seqs=4) as llm:
        assert_type(llm, AsyncLLM)
        async for event in llm.chat("Hello", SamplingParams(max_tokens=5)):
            assert_type(event, TokenEvent)
            assert_type(event.text, str)
        assert_type(await llm.generate("Hello"), RequestOutput)
        outputs = await asyncio.gather(*(llm.generate(prompt) for prompt in ("a", "b")))
        assert_type(outputs, list[RequestOutput])
