"""Gemma 4's assistant drafts what transformers says that it does, and changes no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.drafting.drafter import ModelDrafter
from ktransformers.engine.load.builder import Engine, plan_model
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from tests.engine.drafting.test_mtp import answers_of
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.mtp_engines import Watched, check_drafts, check_engine, engine_of, loop_of
from tests.support.models.assistant_models import TARGETS, tiny_assistant, write_assistant, write_assistant_gguf
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_transformers(
    name: str, is_ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_assistant(name, is_ordered=is_ordered)
    target, assistant = write_assistant(tiny, tmp_path)
    with engine_of(target, speculative="draft", draft_model=assistant) as engine:
        check_engine(engine, tiny, monkeypatch)


@pytest.mark.parametrize("name", TARGETS)
def test_drafting_changes_no_answer(name: str, tmp_path: Path) -> None:
    target, assistant = write_assistant(tiny_assistant(name), tmp_path)
    with engine_of(target, speculative="off") as engine:
        plain = answers_of(loop_of(engine))
    with engine_of(target, speculative="draft", draft_model=assistant) as engine:
        loop = loop_of(engine)
        assert answers_of(loop) == plain
        assert loop.scheduler.stats().num_drafted > 100
        engine.executor.reset()
        assert answers_of(loop_of(engine, num_pages=8)) == plain


@pytest.mark.parametrize("name", ["gemma4", "gemma4-moe"])
def test_from_a_gguf(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which has no clusters."""
    tiny = tiny_assistant(name, is_ordered=True)
    target, _ = write_assistant(tiny, tmp_path)
    assistant = write_assistant_gguf(tiny, tmp_path / "assistant.gguf")
    tiny.assistant.config.use_ordered_embeddings = False
    with engine_of(target, speculative="draft", draft_model=assistant) as engine:
        check_engine(engine, tiny, monkeypatch)


@pytest.mark.parametrize("kv_type", ["bf16", "int8", "fp8"])
def test_it_reads_keys_and_values_of_any_type(kv_type: str, tmp_path: Path) -> None:
    target, assistant = write_assistant(tiny_assistant("gemma4-shared"), tmp_path)
    with engine_of(target, speculative="off", kv_type=kv_type) as engine:
        plain = answers_of(loop_of(engine))
    with engine_of(target, speculative="draft", draft_model=assistant, kv_type=kv_type) as engine:
        read = [cache_of(engine).layer(i)[0].data_ptr() for i in range(3)]
        assert read == [engine.cache.layer(i)[0].data_ptr() for i in (0, 0, 1)]
        assert answers_of(loop_of(engine)) == plain


def cache_of(engine: Engine) -> PagedCache:
    drafter = engine.executor.drafter
    assert isinstance(drafter, ModelDrafter)
    cache: PagedCache = drafter._forward._steps._cache  # type: ignore[attr-defined]
    return cache


def test_it_takes_no_room_for_keys_and_values(tmp_path: Path) -> None:
    target, assistant = write_assistant(tiny_assistant("gemma4"), tmp_path)
    config = EngineConfig(model_path=target, draft_model=assistant, cpu_infer=1, cache_lens=1024)
    few, many = plan_model(config), plan_model(replace(config, cache_lens=4096, speculative="mtp"))  # as llama.cpp says
    assert few.extra_bytes["draft model"]["cpu"] == many.extra_bytes["draft model"]["cpu"] > 0


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"backbone": 80}, "made for hidden states of width 80, and the model has 64"),
        ({"vocab_size": VOCAB_SIZE + 32}, f"a vocabulary of {VOCAB_SIZE + 32}, and the model has {VOCAB_SIZE}"),
        (
            {"head_dim": 24},
            "layer 0 reads 2 heads of 24 over a window of 16, and the model's layer 3 keeps 2 heads of 16",
        ),
        ({"num_key_value_heads": 4}, "it is the assistant of another Gemma 4"),
        ({"is_ordered": True, "clusters": 21}, "its head chooses 6 of 21 clusters of 160 tokens"),
        ({"is_ordered": True, "clusters": 5}, "its head chooses 6 of 5 clusters"),
        ({"sliding_window": 32}, "layer 0 reads 2 heads of 16 over a window of 32, and the model's layer 3"),
    ],
)
def test_another_gemma_4_is_refused(values: dict[str, Any], reason: str, tmp_path: Path) -> None:
    target, assistant = write_assistant(tiny_assistant("gemma4", **values), tmp_path)
    with pytest.raises(UnsupportedError, match=rf"--draft_model .*assistant: .*{reason}"):
        plan_model(EngineConfig(model_path=target, draft_model=assistant, cpu_infer=1))


def test_it_drafts_for_gemma_4_alone_and_never_runs_alone(tmp_path: Path) -> None:
    _, assistant = write_assistant(tiny_assistant("gemma4"), tmp_path)
    written = write_assistant_gguf(tiny_assistant("gemma4"), tmp_path / "assistant.gguf")
    other = write_safetensors(tiny_model("gemma3_text", hidden_size=64), tmp_path / "other")
    with pytest.raises(UnsupportedError, match="drafts for Gemma 4 alone, and the model's type is gemma3_text"):
        plan_model(EngineConfig(model_path=other, draft_model=assistant, cpu_infer=1))
    for paths in ({"model_path": assistant}, {"gguf_path": written}):
        with pytest.raises(UnsupportedError, match="drafts for another model, and does not run alone"):
            plan_model(EngineConfig(**paths, cpu_infer=1))
    with pytest.raises(ConfigError, match=r"--speculative mtp: --draft_model .*other is no assistant of Gemma 4"):
        plan_model(EngineConfig(model_path=other, draft_model=other, speculative="mtp", cpu_infer=1))
    for flag in ("pipeline", "tensor_parallel"):
        with pytest.raises(ConfigError, match=f"--{flag} goes with draft tokens from the text alone"):
            plan_model(EngineConfig(model_path=other, draft_model=assistant, cpu_infer=1, **{flag: 2}))


def test_a_gguf_that_names_no_width_is_refused(tmp_path: Path) -> None:
    opened = open_gguf(write_assistant_gguf(tiny_assistant("gemma4"), tmp_path / "assistant.gguf"))
    for value in (None, 0, -1, "x"):
        metadata = {**opened.metadata, "gemma4-assistant.embedding_length_out": value}
        broken = GGUFModel([replace(file, metadata=metadata) for file in opened.files])
        with pytest.raises(FormatError, match=r"embedding_length_out is .*, not the width of its target"):
            config_of_model(broken)


def test_from_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, graphs = tiny_assistant("gemma4-moe", is_ordered=True), FakeGraphs()
    target, assistant = write_assistant(tiny, tmp_path)
    hardware = fake_hardware(graphs=graphs, graph_rows=(4,))
    how = {"speculative": "draft", "draft_model": assistant}
    with engine_of(target, hardware=hardware, max_batch_size=2, **how) as engine:
        assert engine.uses_gpus
        watched, prompt = Watched(engine, monkeypatch), list(range(3, 30))
        loop = loop_of(engine, max_batch_size=2)
        name = loop.add(prompt, SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
        loop.drain()
        known = [*prompt, *loop.answers[name].token_ids]
        assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) > 6
    assert graphs.replays > 2 or torch.cuda.is_available()
