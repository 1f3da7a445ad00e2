"""Layers for multi-token prediction in a file of their own draft what they draft from the model's."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import plan_model
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.known_drafts import answers_of, told
from tests.support.engines.mtp_engines import Watched, engine_of, loop_of
from tests.support.gguf.deepseek4_mtp import tiny_deepseek4_mtp, write_deepseek4_mtp_gguf
from tests.support.gguf.qwen4_mtp import tiny_qwen4_mtp, write_qwen4_mtp_gguf
from tests.support.gguf.split_mtp import split_mtp
from tests.support.gguf.writer import write_gguf
from tests.support.models.assistant_models import tiny_assistant, write_assistant_gguf
from tests.support.models.mtp_families import GGUF_FAMILIES, tiny_family, write_family_gguf
from tests.support.models.mtp_models import GGUF_MTP_TYPES, tiny_mtp, write_mtp_gguf
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model, write_safetensors

PARAMS = [
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=3),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=5),
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


def write_whole(model_type: str, folder: Path) -> Path:
    folder.mkdir()
    path = folder / "tiny.gguf"
    if model_type in GGUF_MTP_TYPES:
        return write_mtp_gguf(tiny_mtp(model_type), path)
    if model_type == "deepseek_v4":
        return write_deepseek4_mtp_gguf(tiny_deepseek4_mtp(), path, is_joined=True)
    if model_type == "qwen4_exp_text":
        return write_qwen4_mtp_gguf(tiny_qwen4_mtp(), path)
    return write_family_gguf(tiny_family(model_type), path)


def run(path: Path, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[object, object]:
    """Answers, and what was drafted for them."""
    with monkeypatch.context() as patched, engine_of(path, **changes) as engine:
        watched = Watched(engine, patched)
        return told(answers_of(loop_of(engine), PARAMS, VOCAB_SIZE)), watched.by_run


@pytest.mark.parametrize("model_type", [*GGUF_MTP_TYPES, "deepseek_v4", "qwen4_exp_text", *GGUF_FAMILIES])
def test_drafts_are_those_of_one_file(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by name, and named."""
    whole = write_whole(model_type, tmp_path / "whole")
    wanted = run(whole, monkeypatch)
    assert wanted[1]
    model = split_mtp(whole, tmp_path)
    assert run(model, monkeypatch) == wanted
    layers = (tmp_path / "mtp-tiny-Q8_0.gguf").rename(tmp_path / "layers.gguf")
    assert run(model, monkeypatch, draft_model=layers, speculative="auto") == wanted
    with pytest.raises(UnsupportedError, match=r"hold none, .* and no mtp-\*\.gguf is beside them"):
        plan_model(EngineConfig(gguf_path=model, speculative="mtp", cpu_infer=1))


def test_it_is_found_where_quantizers_put_it(tmp_path: Path) -> None:
    """Above the folder of a type, and of several the one as close in bits; it is no model of the folder itself, and its
    bytes are in the plan."""
    model = split_mtp(write_whole("glm4_moe", tmp_path / "whole"), tmp_path)
    (tmp_path / "Q8_0").mkdir()
    inside = model.rename(tmp_path / "Q8_0" / model.name)
    shutil.copy(tmp_path / "mtp-tiny-Q8_0.gguf", tmp_path / "mtp-tiny-Q4_0.gguf")
    (tmp_path / "mtp-tiny-Q2_K.gguf").write_bytes(b"GGUF")
    shutil.rmtree(tmp_path / "whole")
    config = EngineConfig(gguf_path=tmp_path, speculative="mtp", cpu_infer=1, cache_lens=512)
    plan = plan_model(config)
    assert plan.extra_bytes["draft model"]["cpu"] > 0
    for name in ("mtp-tiny-Q8_0.gguf", "mtp-tiny-Q4_0.gguf"):
        (tmp_path / name).unlink()
    with pytest.raises(FormatError, match="mtp-tiny-Q2_K"):
        plan_model(config)
    assert "draft model" not in plan_model(EngineConfig(gguf_path=inside, cpu_infer=1, cache_lens=512)).extra_bytes


def test_an_assistant_of_such_a_name_drafts(tmp_path: Path) -> None:
    tiny = tiny_assistant("gemma4-moe")
    model = write_gguf(tiny.main, tmp_path / "tiny.gguf", arch="gemma4")
    with engine_of(model, speculative="off") as engine:
        plain = told(answers_of(loop_of(engine), PARAMS, VOCAB_SIZE))
    write_assistant_gguf(tiny, tmp_path / "mtp-tiny.gguf")
    with engine_of(model) as engine:
        assert engine.drafter == "draft"
        loop = loop_of(engine)
        assert told(answers_of(loop, PARAMS, VOCAB_SIZE)) == plain
        assert loop.scheduler.stats().num_drafted > 20


def test_layers_of_another_model_are_refused(tmp_path: Path) -> None:
    """And layers as a model, and for safetensors, which have their own."""
    model = split_mtp(write_whole("glm4_moe", tmp_path / "a"), tmp_path)
    (tmp_path / "b").mkdir()
    split_mtp(write_whole("hy_v3", tmp_path / "c"), tmp_path / "b")
    other = tmp_path / "b" / "mtp-tiny-Q8_0.gguf"
    with pytest.raises(ConfigError, match=r"of hy_v3, and the model has .* of glm4moe: they are of another model"):
        plan_model(EngineConfig(gguf_path=model, draft_model=other, cpu_infer=1))
    alone = r"its layers, from \d on, are for multi-token prediction alone: they draft for a GGUF of the model"
    with pytest.raises(UnsupportedError, match=alone):
        plan_model(EngineConfig(gguf_path=other, cpu_infer=1))
    folder = write_safetensors(tiny_model("glm4_moe"), tmp_path / "d")
    with pytest.raises(UnsupportedError, match=f"--draft_model .*{alone}"):
        plan_model(EngineConfig(model_path=folder, draft_model=other, cpu_infer=1))
