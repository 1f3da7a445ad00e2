"""Weights that are damaged: the error names the tensor and its file, whichever engine met it."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import Pooling, SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.damage import scan
from ktransformers.engine.damage.scan import find_damage
from ktransformers.engine.load.builder import build_engine
from ktransformers.errors import KTransformersError
from ktransformers.kernels.types import QuantType
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.safetensors.file import open_safetensors
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors

NAN, INFINITY, HUGE = (struct.pack("<f", value) for value in (float("nan"), float("inf"), 3e38))
HALF_NAN = b"\x00\x7e"
PROMPT = list(range(5, 25))


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def damaged(folder: Path, name: str, data: bytes, shard_size: str = "1GB") -> tuple[EngineConfig, str]:
    """A model of safetensors with a few wrong bytes in one tensor. What must be named: the file."""
    write_safetensors(tiny_model("qwen3_moe", seed=6), folder, shard_size)
    for file in open_safetensors(folder).files:
        if name in file.tensors:
            overwrite(file.path, file.tensors[name].offset + 8, data)
            return EngineConfig(model_path=folder, cache_lens=96, cpu_infer=1, self_check=False), file.path.name
    raise AssertionError(name)


def damaged_gguf(
    folder: Path, name: str, experts: QuantType, dense: QuantType, splits: int
) -> tuple[EngineConfig, str]:
    """The same, a GGUF file of blocks, whose first two bytes are a scale, or splits of one."""
    path = write_gguf(tiny_model("qwen3_moe", seed=6), folder / "m.gguf", experts, dense, shard_max_tensors=splits)
    for file in open_gguf(path).files:
        if name in file.tensors:
            overwrite(file.path, file.tensors[name].offset, HALF_NAN)
            return EngineConfig(gguf_path=path, cache_lens=96, cpu_infer=1, self_check=False), file.path.name
    raise AssertionError(name)


NORM, UP, HEAD = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
MADE: dict[str, tuple[str, Callable[[Path], tuple[EngineConfig, str]]]] = {
    "NaN in a norm": (NORM, lambda folder: damaged(folder, NORM, NAN)),
    "infinity in a projection": (UP, lambda folder: damaged(folder, UP, INFINITY)),
    "NaN in the head, of shards": (HEAD, lambda folder: damaged(folder, HEAD, NAN, "60KB")),
    "a weight of 3e38": (NORM, lambda folder: damaged(folder, NORM, HUGE * 8)),
    "a scale of Q8_0": (
        "blk.0.attn_q.weight",
        lambda folder: damaged_gguf(folder, "blk.0.attn_q.weight", QuantType.Q8_0, QuantType.Q8_0, 0),
    ),
    "a scale of Q4_0 in a split": (
        "blk.1.attn_output.weight",
        lambda folder: damaged_gguf(folder, "blk.1.attn_output.weight", QuantType.Q8_0, QuantType.Q4_0, 7),
    ),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("kind", MADE)
def test_the_tensor_is_named(
    kind: str, paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scan, "PATIENCE", 60.0)
    name, make = MADE[kind]
    config, file = make(tmp_path)
    caplog.set_level(logging.ERROR, "ktransformers")
    with _opened(config, paged) as llm:
        for _ in range(2):
            with pytest.raises(KTransformersError) as caught:
                list(llm.stream(PROMPT, SamplingParams(max_tokens=4, temperature=0)))
            assert f"{name!r} of {file}" in str(caught.value)
            assert "damaged" in str(caught.value)
    lines = [line for line in caplog.messages if f"{name!r} of {file}" in line]
    assert len(lines) == 1  # it was looked for once


@pytest.mark.every(3)
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("pooling", [Pooling.FIRST, Pooling.MEAN])
def test_the_tensor_is_named_where_only_an_embedding_is_bad(
    pooling: Pooling, paged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token sees nothing of the first: windows are shorter than the prompt, so that its logits are good."""
    monkeypatch.setattr(scan, "PATIENCE", 60.0)
    write_safetensors(tiny_model("mistral", seed=6), tmp_path)
    name = "model.embed_tokens.weight"
    (file,) = open_safetensors(tmp_path).files
    overwrite(file.path, file.tensors[name].offset, NAN)  # of token 0
    config = EngineConfig(model_path=tmp_path, cache_lens=96, cpu_infer=1, self_check=False)
    with _opened(config, paged) as llm:
        prompt = [0, *range(5, 85)]
        (good,) = llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0, pooling=Pooling.LAST))
        assert good.embedding is not None
        assert np.isfinite(np.frombuffer(good.embedding, "<f4")).all()
        with pytest.raises(KTransformersError, match="nan as number 0 of a prompt's embedding: its weights") as caught:
            list(llm.stream(prompt, SamplingParams(max_tokens=1, temperature=0, pooling=pooling)))
        assert f"{name!r} of {file.path.name} (1)" in str(caught.value)
        (good,) = llm.stream(prompt[1:], SamplingParams(max_tokens=1, temperature=0, pooling=pooling))
        assert good.embedding is not None  # others are answered


def _opened(config: EngineConfig, paged: bool) -> LLM:
    if not paged:
        return LLM.from_engine(build_engine(config))
    where = {"model_path": config.model_path, "gguf_path": config.gguf_path}
    return LLM(**where, cache_lens=96, cpu_infer=1, self_check=False, page_size=8)


def test_what_is_said_of_good_files(tmp_path: Path) -> None:
    write_safetensors(tiny_model("llama", seed=6), tmp_path)
    config = EngineConfig(model_path=tmp_path)
    assert find_damage(config) == "no tensor of the files holds NaN or infinity: its config does not fit them"
    assert find_damage(EngineConfig()) == ""


def test_many_damaged_tensors_are_counted(tmp_path: Path) -> None:
    write_safetensors(tiny_model("llama", seed=6), tmp_path)
    (file,) = open_safetensors(tmp_path).files
    for tensor in file.tensors.values():
        overwrite(file.path, tensor.offset, NAN * 2)
    said = find_damage(EngineConfig(model_path=tmp_path))
    assert said.count(" of model.safetensors (2)") == 3
    assert f"and {len(file.tensors) - 3} tensors more" in said
