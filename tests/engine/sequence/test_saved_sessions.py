"""Sessions in files: whatever engine saves one, whatever engine loads it, its answer goes on with the same tokens."""

from __future__ import annotations

import asyncio
import itertools
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, SamplingParams
from ktransformers.engine.api.async_llm import AsyncLLM
from ktransformers.engine.api.batch_loop import BatchLoop
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.engine.model.fingerprint import Identified
from ktransformers.engine.sequence.partial import PartialGeneration
from ktransformers.engine.sequence.saved_session import SavedSession
from ktransformers.errors import ConfigError, ContextLengthError, EngineError, SessionFileError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.scheduler.records import StepPlan, StepResult
from ktransformers.weights.digests.files import WeightDigest
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.engines.sequential import Session
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model

PARAMS = SamplingParams(
    max_drafts=0,
    temperature=1.1,
    seed=11,
    max_tokens=90,
    ignore_eos=True,
    repetition_penalty=1.1,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    logit_bias={5: 1.0},
)
CACHE, STOPPED = 512, 37  # tokens of the cache, of the answer when it is stopped
PAGE_SIZE = 16  # of engines for one sequence


def some_ids(count: int, seed: int = 7) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = some_ids(150)


@dataclass
class Made:
    """A model, and engines of it: "one" for one sequence, or for two with pages of so many tokens."""

    config: EngineConfig
    align: int = 1  # pages and states are found at multiples of it

    @cached_property
    def engine(self) -> StaticEngine:
        """Of the oracle."""
        return static_engine(self.config)

    def paged(self, page_size: int) -> Engine:
        return build_engine(self.config, page_size=page_size, max_batch_size=2)

    def fresh(self, kind: str) -> LLM:
        """With an empty cache."""
        return LLM.from_engine(build_engine(self.config) if kind == "one" else self.paged(int(kind)))

    def tokens(self, prompt: Sequence[int], params: SamplingParams = PARAMS) -> list[int | None]:
        """Of an undisturbed run without a scheduler."""
        session = Session.of(self.engine)
        return [event.token_id for event in session.generate(prompt, params)]

    @cached_property
    def answer(self) -> list[int | None]:
        return self.tokens(PROMPT)


def gguf(model_type: str, qtype: QuantType, folder: Path) -> EngineConfig:
    path = write_gguf(tiny_model(model_type, seed=6), folder / "model.gguf", qtype, qtype)
    return EngineConfig(gguf_path=path, cache_lens=CACHE, cpu_infer=1, self_check=False, chunk_size=48)


def safetensors(model: Any, folder: Path) -> EngineConfig:
    model.save_pretrained(folder)
    return EngineConfig(model_path=folder, cache_lens=CACHE, cpu_infer=1, self_check=False, chunk_size=48)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "qwen3_next"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Grouped-query attention of a GGUF, latent attention and recurrent layers of safetensors."""
    folder, family = tmp_path_factory.mktemp(request.param), request.param
    if family == "qwen3_moe":
        made = Made(gguf(family, QuantType.Q8_0, folder))
    elif family == "deepseek_v3":
        made = Made(safetensors(tiny_model(family, seed=6), folder))
    else:
        made = Made(safetensors(recurrent_model(family), folder), align=64)
    yield made
    made.engine.close()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    made = Made(gguf("qwen3_moe", QuantType.Q8_0, tmp_path_factory.mktemp("qwen")))
    yield made
    made.engine.close()


def stopped(llm: LLM, path: Path, count: int = STOPPED) -> tuple[list[int | None], SavedSession]:
    """The beginning of an answer, and the session that is saved then."""
    begun = llm.stream(PROMPT, PARAMS)
    first = [event.token_id for event in itertools.islice(begun, count)]
    output_ids = [*PROMPT, *(token for token in first if token is not None)]
    begun.close()  # type: ignore[attr-defined]
    saved = llm.save_session(path, output_ids)
    # As an answer that was stopped: the same with its parameters.
    output = llm.generate([PROMPT], replace(PARAMS, max_tokens=count))[0]
    assert list(output.token_ids) == first
    saved = llm.save_session(path, replace(output, params=PARAMS, finish_reason=FinishReason.ABORT))
    return first, saved


class Rows:
    """Counts what an LLM runs."""

    def __init__(self, llm: LLM, monkeypatch: pytest.MonkeyPatch):
        self.num = 0
        executor = llm._batches.engine.executor
        execute = executor.execute

        def executed(plan: StepPlan) -> StepResult:
            self.num += plan.num_tokens
            return execute(plan)

        monkeypatch.setattr(executor, "execute", executed)


WAYS = [("one", "one"), ("one", "16"), ("one", "64"), ("16", "one"), ("64", "one"), ("16", "64")]


@pytest.mark.every(5)
@pytest.mark.parametrize(("source", "target"), WAYS, ids=[f"{a} to {b}" for a, b in WAYS])
def test_an_answer_goes_on_in_another_engine(
    made: Made, source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.safetensors"
    want, llm = made.answer, made.fresh(source)
    first, saved = stopped(llm, path)
    assert first == want[:STOPPED]
    known_len = len(PROMPT) + STOPPED
    steps = {"one": PAGE_SIZE, "16": 16, "64": 64}
    assert saved.cached_len == (known_len - 1) // steps[source] * steps[source]
    llm.close()
    other = made.fresh(target)
    loaded = other.load_session(path)
    assert loaded == replace(saved, cached_len=loaded.cached_len)
    assert loaded.cached_len == saved.cached_len // steps[target] * steps[target]
    with monkeypatch.context() as patch:
        rows = Rows(other, patch)
        rest = [event.token_id for event in other.continue_answer(loaded)]
    assert first + rest == want
    resumed = loaded.cached_len // made.align * made.align
    assert rows.num == known_len - resumed + len(rest) - 1
    # And the next turn, too.
    turn = [*PROMPT, *(token for token in want if token is not None), *some_ids(20, seed=9)]
    params = replace(PARAMS, max_tokens=8)
    output = other.generate([turn], params)[0]
    other.close()
    assert list(output.token_ids) == made.tokens(turn, params)


@pytest.mark.every(3)
def test_a_conversation_goes_on(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many turns in one engine; the last one in another, which computes only what is new."""
    path, params = tmp_path / "s.safetensors", replace(PARAMS, max_tokens=12)
    history = list(PROMPT)
    with made.fresh("one") as llm:
        for turn in range(3):
            output = llm.generate([history], params)[0]
            saved = llm.save_session(path, output, [{"role": "user", "content": str(turn)}])
            history += [*output.token_ids, *some_ids(15, seed=turn)]
        want = llm.generate([history], params)[0].token_ids
    assert list(want) == made.tokens(history, params)
    other = made.fresh("64")
    assert other.load_session(path).messages == saved.messages == [{"role": "user", "content": "2"}]
    with monkeypatch.context() as patch:
        rows = Rows(other, patch)
        assert other.generate([history], params)[0].token_ids == want
    assert rows.num - 11 == len(history) - saved.cached_len // 64 * 64
    other.close()


@pytest.mark.every(3)
def test_loading_beside_others_and_what_is_there(made: Made, tmp_path: Path) -> None:
    """Pages that are known already stay, and streams that run are not disturbed."""
    path, params = tmp_path / "s.safetensors", replace(PARAMS, max_tokens=30)
    with made.fresh("one") as llm:
        output = llm.generate([PROMPT], params)[0]
        llm.save_session(path, output)
    other_prompt = some_ids(70, seed=4)
    want = made.tokens(other_prompt, params)
    with made.fresh("16") as paged:
        assert paged.generate([PROMPT[:100]], replace(params, max_tokens=1))[0].stats.cached_len == 0
        running = paged.stream(other_prompt, params)
        first = [next(running).token_id for _ in range(5)]
        for _ in range(2):
            assert paged.load_session(path).cached_len == 176
        assert first + [event.token_id for event in running] == want
        again = paged.generate([PROMPT], params)[0]
        assert again.token_ids == output.token_ids
        assert again.stats.cached_len >= 128
        paged._batches._loop.driver.scheduler.check_integrity()  # type: ignore[union-attr]


@pytest.mark.every(3)
def test_where_there_is_little_room(made: Made, tmp_path: Path) -> None:
    """What does not fit into free pages is computed again."""
    path = tmp_path / "s.safetensors"
    with made.fresh("one") as large:
        _, saved = stopped(large, path)
    small = build_engine(replace(made.config, cache_lens=256), page_size=16, max_batch_size=2)
    with LLM.from_engine(small) as llm:
        running = llm.stream(some_ids(100, seed=4), replace(PARAMS, max_tokens=100))
        next(running)
        assert llm.load_session(path).cached_len < saved.cached_len
        list(running)
        loaded = llm.load_session(path)
        assert loaded.cached_len == 176
        rest = [event.token_id for event in llm.continue_answer(loaded, replace(PARAMS, max_tokens=60))]
    assert rest == made.answer[STOPPED:60]


@pytest.mark.exhaustive
def test_text_and_constraints_go_on(tmp_path: Path) -> None:
    """Half of a character, the beginning of a stop string, the middle of what a schema demands."""
    path, schema = tmp_path / "s.safetensors", {"type": "object", "properties": {"a": {"type": "number"}}}
    engine = build_engine(EngineConfig(gguf_path=DEMO_GGUF, cpu_infer=1, cache_lens=256))
    with LLM.from_engine(engine) as llm, LLM(DEMO_GGUF, cpu_infer=1, cache_lens=256, page_size=8) as paged:
        for params in (
            SamplingParams(temperature=1.5, seed=1, max_tokens=24, stop=(" xyz", ". a")),
            SamplingParams(temperature=1.0, seed=2, max_tokens=24, constraint={"json": schema}),  # type: ignore[arg-type]
        ):
            whole = list(llm.stream("Who are you?", params))
            for count in range(1, len(whole), 3):
                first = whole[:count]
                known = [event.token_id for event in first if event.token_id is not None]
                llm.save_session(path, PartialGeneration(llm.tokenizer.encode("Who are you?"), params, known))
                for other in (llm, paged):
                    rest = list(other.continue_answer(other.load_session(path)))
                    assert [event.token_id for event in rest] == [event.token_id for event in whole[count:]]
                    assert "".join(event.text for event in first + rest) == "".join(event.text for event in whole)
                    assert rest[-1].finish_reason is whole[-1].finish_reason


# Refused: nothing is lost.


def other_models(folder: Path) -> dict[str, EngineConfig]:
    (folder / "a").mkdir()
    (folder / "b").mkdir()
    bigger = tiny_model("qwen3_moe", seed=6, layers=3)
    other = write_gguf(tiny_model("qwen3_moe", seed=7), folder / "b" / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    return {
        "weights in F32, Q4_0": gguf("qwen3_moe", QuantType.Q4_0, folder),
        "another model": safetensors(bigger, folder / "a"),
        "of the same shape with other weights": EngineConfig(
            gguf_path=other, cache_lens=CACHE, cpu_infer=1, self_check=False
        ),
    }


@pytest.mark.exhaustive
def test_sessions_of_other_models(qwen: Made, tmp_path: Path) -> None:
    llm, path = qwen.fresh("one"), tmp_path / "s.safetensors"
    for reason, config in other_models(tmp_path).items():
        with LLM.from_engine(build_engine(config)) as foreign:
            stopped(foreign, path, 3)
        running = llm.stream(PROMPT, PARAMS)
        first = [next(running).token_id for _ in range(4)]
        for recompute in (False, True):
            with pytest.raises(SessionFileError, match=reason):
                llm.load_session(path, recompute=recompute)
        assert first + [event.token_id for event in running] == qwen.answer, reason  # it was not even disturbed


def test_the_same_model_elsewhere(qwen: Made, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with qwen.fresh("one") as llm:
        stopped(llm, path)
    assert qwen.config.gguf_path is not None
    moved = shutil.copy(qwen.config.gguf_path, tmp_path / "moved.gguf")
    engine = build_engine(replace(qwen.config, gguf_path=Path(moved), cpu_infer=2, cache_lens=300, chunk_size=7))
    assert engine.identity.digest == qwen.engine.identity.digest
    with LLM.from_engine(engine) as llm:
        loaded = llm.load_session(path)
        assert [event.token_id for event in llm.continue_answer(loaded)] == qwen.answer[STOPPED:]


def test_another_arithmetic(qwen: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As it is with a GPU's cache on the CPU."""
    path = tmp_path / "s.safetensors"
    with qwen.fresh("one") as llm:
        _, saved = stopped(llm, path)
    for kind in ("one", "16"):
        other = qwen.fresh(kind)
        engine = other.engine
        identity = engine.identity
        other_cache = replace_struct(identity, arithmetic=identity.arithmetic | {"the cache": "cuda bfloat16"})
        engine.identified = Identified(other_cache, WeightDigest(()))
        with pytest.raises(
            SessionFileError, match=r"the cache was keys cpu float32 \[.*\] in layers 0-1; .* and is cuda"
        ):
            other.load_session(path)
        with caplog.at_level(logging.WARNING):
            loaded = other.load_session(path, recompute=True)
        assert "computed again: the cache was" in caplog.text
        assert loaded == replace(saved, cached_len=0)
        assert [event.token_id for event in other.continue_answer(loaded)] == qwen.answer[STOPPED:]
        other.close()


def replace_struct(struct: Any, **changes: Any) -> Any:
    return type(struct)(**{name: getattr(struct, name) for name in struct.__struct_fields__} | changes)


@pytest.mark.exhaustive
def test_sessions_that_are_too_long(qwen: Made, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with qwen.fresh("one") as llm:
        stopped(llm, path)
    config = replace(qwen.config, cache_lens=128)
    with LLM.from_engine(build_engine(config)) as llm, pytest.raises(ContextLengthError, match="187 tokens"):
        llm.load_session(path)
    paged = build_engine(config, page_size=16, max_batch_size=2)
    with LLM.from_engine(paged) as llm, pytest.raises(ContextLengthError, match="187 tokens"):
        llm.load_session(path)


def test_what_cannot_be_continued_or_saved(qwen: Made, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    for kind in ("one", "64"):
        llm = qwen.fresh(kind)
        output = llm.generate([PROMPT], replace(PARAMS, max_tokens=5))[0]
        saved = llm.save_session(path, output)
        with pytest.raises(ConfigError, match="nothing to continue after 5 tokens: max_tokens"):
            llm.continue_answer(saved)
        longer = list(llm.continue_answer(saved, replace(PARAMS, max_tokens=8)))
        assert [event.token_id for event in longer] == qwen.answer[5:8]
        last = output.token_ids[-1]
        with pytest.raises(ConfigError, match=r"nothing to continue after \d tokens: it ended"):
            llm.continue_answer(saved, replace(PARAMS, stop_token_ids=(last,)))
        with pytest.raises(ConfigError, match="no answer to continue"):
            llm.continue_answer(llm.save_session(path, PROMPT))
        with pytest.raises(ConfigError, match="token ids must be in"):
            llm.save_session(path, [10**6])
        llm.close()
        with pytest.raises(EngineError, match="closed"):
            llm.load_session(path)
    reference = build_reference_engine(EngineConfig(gguf_path=DEMO_GGUF, cache_lens=64))
    with (
        LLM.from_loop(BatchLoop(lambda report: reference)) as llm,  # type: ignore[arg-type]
        pytest.raises(UnsupportedError, match="does not let its cache be copied"),
    ):
        llm.save_session(path, [1, 2, 3])


def test_an_empty_session(qwen: Made, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"
    with qwen.fresh("one") as llm:
        assert llm.save_session(path, ()).token_ids == ()
        assert llm.load_session(path).cached_len == 0
        assert [event.token_id for event in llm.stream(PROMPT, PARAMS)] == qwen.answer


def test_without_a_prefix_cache(qwen: Made, tmp_path: Path) -> None:
    """Tokens alone are saved and loaded."""
    path = tmp_path / "s.safetensors"
    engine = build_engine(replace(qwen.config, prefix_cache=False), page_size=16, max_batch_size=2)
    with LLM.from_engine(engine) as llm:
        _, saved = stopped(llm, path)
        loaded = llm.load_session(path)
        assert (saved.cached_len, loaded.cached_len) == (0, 0)
        assert [event.token_id for event in llm.continue_answer(loaded)] == qwen.answer[STOPPED:]


def test_asyncio(qwen: Made, tmp_path: Path) -> None:
    path = tmp_path / "s.safetensors"

    async def run() -> tuple[SavedSession, SavedSession, list[int]]:
        async with AsyncLLM.from_engine(qwen.paged(16)) as llm:
            output = await llm.generate(PROMPT, replace(PARAMS, max_tokens=STOPPED))
            saved = await llm.save_session(path, replace(output, params=PARAMS))
            loaded = await llm.load_session(path)
            rest = await llm.continue_answer(loaded)
            with pytest.raises(ConfigError, match="nothing to continue"):
                await llm.continue_answer(loaded, replace(PARAMS, max_tokens=STOPPED))
            return saved, loaded, list(rest.token_ids)

    saved, loaded, rest = asyncio.run(run())
    assert loaded == saved
    assert rest == qwen.answer[STOPPED:]


@pytest.mark.exhaustive
def test_a_gpus_session(qwen: Made, tmp_path: Path) -> None:
    """Goes on on a GPU from its cache, and on the CPU from its tokens."""
    path, params, prompt = tmp_path / "s.safetensors", replace(PARAMS, max_tokens=4), PROMPT[:17]
    config = replace(qwen.config, cache_lens=64)
    with LLM.from_engine(build_engine(config, hardware=fake_hardware())) as gpu:
        want = list(gpu.generate(prompt, params)[0].token_ids)
        assert gpu.save_session(path, PartialGeneration(prompt, params, want[:2])).cached_len == 16
    with LLM.from_engine(build_engine(config, hardware=fake_hardware())) as gpu:
        loaded = gpu.load_session(path)
        assert loaded.cached_len == 16
        assert [event.token_id for event in gpu.continue_answer(loaded)] == want[2:]
    cpu = qwen.fresh("one")
    with pytest.raises(
        SessionFileError, match=r"modules was some on a GPU and is all on the CPU.*; the cache was keys cuda"
    ):
        cpu.load_session(path)
    loaded = cpu.load_session(path, recompute=True)
    assert loaded.cached_len == 0
    assert len(list(cpu.continue_answer(loaded))) == 2
