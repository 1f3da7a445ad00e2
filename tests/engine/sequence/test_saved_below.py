"""Sessions whose pages the cache has given up: what tiers hold of them is in the file, whole and exact."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.sequence import session_store
from ktransformers.engine.sequence.outputs import RequestOutput
from ktransformers.errors import SessionFileError
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.sequential import Session
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model

PARAMS = SamplingParams(temperature=1.1, seed=11, max_tokens=40, ignore_eos=True, repetition_penalty=1.1)
PAGE_SIZE, CACHE = 16, 256


def some_ids(count: int, seed: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = some_ids(150, 7)


class Made:
    """A model: `single`, the oracle, with a cache that holds all, and engines of pages that do not."""

    def __init__(self, config: EngineConfig):
        self.config = config
        self.engine = static_engine(replace(config, cache_lens=1024))
        self.single = Session.of(self.engine)
        self.wanted = self.answer(PROMPT, PARAMS)

    def answer(self, prompt: list[int], params: SamplingParams) -> tuple[int | None, ...]:
        return tuple(event.token_id for event in self.single.generate(prompt, params))

    def paged(self, **changes: object) -> LLM:
        engine = build_engine(replace(self.config, **changes), page_size=PAGE_SIZE, max_batch_size=2)  # type: ignore[arg-type]
        return LLM.from_engine(engine)


@pytest.fixture(scope="module", params=["qwen3_moe", "qwen3_next", "mamba2", "int8"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    folder = tmp_path_factory.mktemp(request.param)
    is_recurrent = request.param in ("qwen3_next", "mamba2")
    model = recurrent_model(request.param) if is_recurrent else tiny_model("qwen3_moe", seed=6)
    model.save_pretrained(folder)
    kv_type = "int8" if request.param == "int8" else "auto"
    found = Made(
        EngineConfig(model_path=folder, cache_lens=CACHE, cpu_infer=1, self_check=False, chunk_size=48, kv_type=kv_type)
    )
    yield found
    found.engine.close()


def begun(llm: LLM) -> RequestOutput:
    """An answer that is half done, and pushed out of the cache by others."""
    output = llm.generate([PROMPT], replace(PARAMS, max_tokens=20))[0]
    for seed in (1, 2):
        llm.generate([some_ids(CACHE - 30, seed)], replace(PARAMS, max_tokens=20))
    batches = llm._batches
    assert batches is not None
    tokens = [*PROMPT, *output.token_ids]
    in_cache, known = batches.visit(lambda store: store.count(tokens))
    assert in_cache < known == (len(tokens) - 1) // PAGE_SIZE * PAGE_SIZE
    return replace(output, params=PARAMS)


def where(kind: str, folder: Path) -> dict[str, object]:
    """Tiers. "disk": host memory for the pages that pass through, no more."""
    if kind == "host":
        return {"cpu_memory_size_GB": 0.01}
    return {"cpu_memory_size_GB": 0.0005, "kv_disk_path": folder}


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("piece", [1, 64 << 20])
def test_it_is_all_in_the_file(
    made: Made, kind: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_store, "PIECE_BYTES", piece)
    folder, path = tmp_path / "pages", tmp_path / "s.safetensors"
    folder.mkdir(mode=0o700)
    with made.paged(**where(kind, folder)) as llm:
        saved = llm.save_session(path, begun(llm))
        llm._batches._loop.driver.scheduler.check_integrity()  # type: ignore[union-attr]
    assert saved.cached_len == 160
    assert sorted(each.name for each in tmp_path.iterdir()) == ["pages", "s.safetensors"]
    with made.paged() as other:
        loaded = other.load_session(path)
        assert loaded.cached_len == 160
        output = other.generate([loaded.token_ids], replace(PARAMS, max_tokens=1))[0]
        assert output.stats.cached_len == (128 if made.engine.runner.cache.states else 160)
        assert made.wanted == (*saved.answer_ids, *(event.token_id for event in other.continue_answer(loaded)))


@pytest.mark.exhaustive
@pytest.mark.every(3)
def test_a_service_saves_what_the_one_before_it_left_in_files(made: Made, tmp_path: Path) -> None:
    folder, path = tmp_path / "pages", tmp_path / "s.safetensors"
    folder.mkdir(mode=0o700)
    with made.paged(**where("disk", folder)) as llm:
        output = llm.generate([PROMPT], replace(PARAMS, max_tokens=20))[0]
    with made.paged(**where("disk", folder)) as llm:
        saved = llm.save_session(path, replace(output, params=PARAMS))
    assert saved.cached_len == 160
    with made.paged() as other:
        loaded = other.load_session(path)
        assert made.wanted == (*saved.answer_ids, *(event.token_id for event in other.continue_answer(loaded)))
        assert loaded.cached_len == 160


@pytest.mark.every(3)
def test_others_go_on_meanwhile(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_store, "PIECE_BYTES", 1)
    other_prompt, params = some_ids(90, 4), replace(PARAMS, max_tokens=100)
    wanted = made.answer(other_prompt, params)
    with made.paged(cpu_memory_size_GB=0.01) as llm:
        output, heard = begun(llm), list[int | None]()
        thread = threading.Thread(target=lambda: heard.extend(e.token_id for e in llm.stream(other_prompt, params)))
        thread.start()
        for number in range(3):
            assert llm.save_session(tmp_path / f"{number}.safetensors", output).cached_len == 160
        thread.join()
    assert tuple(heard) == wanted
    sums = set()
    for path in tmp_path.iterdir():
        with safe_open(path, framework="pt") as file:
            sums.add(file.metadata()["checksum"])
    assert len(sums) == 1


@pytest.mark.every(3)
def test_a_file_that_is_cut_ends_what_is_saved(made: Made, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, path = tmp_path / "pages", tmp_path / "s.safetensors"
    folder.mkdir(mode=0o700)
    with made.paged(**where("disk", folder)) as llm:
        output = begun(llm)
        for each in folder.glob("*-4.page"):
            os.truncate(each, each.stat().st_size // 2)
        with caplog.at_level(logging.INFO):
            saved = llm.save_session(path, output)
    if saved.cached_len < 160:  # else host memory had it
        assert saved.cached_len == 64
        assert "of 160 tokens that tiers had, 64 could be fetched" in caplog.text
    with made.paged() as other:
        loaded = other.load_session(path)
        assert made.wanted == (*saved.answer_ids, *(event.token_id for event in other.continue_answer(loaded)))


@pytest.mark.every(3)
def test_a_disk_without_room_is_said(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with made.paged(cpu_memory_size_GB=0.01) as llm:
        output = begun(llm)
        with pytest.raises(SessionFileError, match=r"cannot save the session to .*: No space left on device"):
            llm.save_session(tmp_path / "s.safetensors", output)
        assert llm.generate([PROMPT], PARAMS)[0].token_ids == made.wanted
    assert not list(tmp_path.iterdir())


@pytest.mark.every(3)
def test_states_are_copies(made: Made) -> None:
    """Written to a file while steps go on."""
    with made.paged() as llm:
        output = llm.generate([PROMPT], PARAMS)[0]
        batches = llm._batches
        assert batches is not None
        states = batches.visit(lambda store: store.take_states([*PROMPT, *output.token_ids]))
        cache = batches.engine.cache
        held = {} if cache.states is None else cache.states.tensors()
        assert bool(states) == bool(held)
        memory = {tensor.untyped_storage().data_ptr() for tensor in held.values()}
        for state in states.values():
            assert not memory & {tensor.untyped_storage().data_ptr() for tensor in state.values()}  # type: ignore[union-attr]
