"""Closing a model frees its weights and its cache, though its name lives on."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.async_llm import AsyncLLM
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.errors import EngineError

DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
FEW = SamplingParams(temperature=0.0, max_tokens=2)


def modules() -> weakref.WeakSet[torch.nn.Module]:
    """Our operators that live now. Collects first, so that others' garbage does not count."""
    gc.collect()
    found = (one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module))
    return weakref.WeakSet(one for one in found if type(one).__module__.startswith("ktransformers."))


def tensor_bytes() -> int:
    """Of all tensors that live, without a collection: what is left must have been freed by `close` itself."""
    seen = {
        one.untyped_storage().data_ptr(): one.untyped_storage().nbytes()
        for one in gc.get_objects()
        if issubclass(type(one), torch.Tensor) and not one.is_meta
    }
    return sum(seen.values())


def paged() -> LLM:
    engine = build_engine(EngineConfig(gguf_path=DEMO, cpu_infer=1, cache_lens=64), page_size=8, max_batch_size=2)
    return LLM.from_engine(engine)


MADE: dict[str, Callable[[], LLM]] = {
    "constructor": lambda: LLM(DEMO, cpu_infer=1, cache_lens=20000),
    "paged engine": paged,
    "engine of one sequence": lambda: LLM.from_engine(
        build_engine(EngineConfig(gguf_path=DEMO, cpu_infer=1, cache_lens=64))
    ),
}


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("way", ["close", "with"])
def test_closing_frees_weights_and_cache(name: str, way: str) -> None:
    before, nbytes = modules(), tensor_bytes()
    llm = MADE[name]()
    assert llm.chat("Hello", FEW)[0].token_ids
    assert llm.generate("Hello", FEW, guided_choice=["a", "b"])[0].token_ids  # a grammar, too
    more = [one for one in modules() if one not in before]
    held = tensor_bytes() - nbytes
    assert more
    made = weakref.WeakSet(more)
    del more
    if way == "close":
        llm.close()
    else:
        with llm:
            pass
    assert repr(llm) == "LLM(closed)"
    assert len(made) == 0
    assert tensor_bytes() - nbytes < 0.02 * held + (1 << 16)


@pytest.mark.exhaustive
def test_closing_asynchronous_models() -> None:
    async def run() -> AsyncLLM:
        async with AsyncLLM(DEMO, cpu_infer=1, cache_lens=64) as llm:
            await llm.generate("Hello", FEW)
            made.update(one for one in modules() if one not in before)
            assert made
        return llm

    before = modules()
    made: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
    llm = asyncio.run(run())
    assert repr(llm) == "AsyncLLM(closed)"
    assert len(made) == 0


def test_every_later_use_says_that_it_is_closed() -> None:
    llm = LLM(DEMO, cpu_infer=1, cache_lens=64)
    session = llm.generate("Hello", FEW)[0]
    llm.close()
    uses: list[Callable[[], object]] = [
        lambda: llm.generate("a"),
        lambda: llm.chat("a"),
        lambda: llm.stream("a"),
        lambda: llm.engine,
        lambda: llm.saved_nbytes([1]),
        lambda: llm.suspend("a"),
        lambda: llm.resume("a"),
        lambda: llm.save_session("/nowhere/at/all", session),
        lambda: llm.load_session("/nowhere/at/all"),
    ]
    for use in uses:
        with pytest.raises(EngineError, match="this LLM is closed: make a new one"):
            use()
    assert llm.tokenizer.encode("a")  # is text, and holds no weights
    llm.close()
