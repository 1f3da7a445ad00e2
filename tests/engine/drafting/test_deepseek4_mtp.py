"""DeepSeek-V4's layer for multi-token prediction, whose hidden states are streams, drafts what its reference would."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.model.opened import open_model
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.reference import dequantize
from ktransformers.weights.source import ExpertsLayout
from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.known_drafts import answers_of, told
from tests.support.engines.mtp_engines import check_engine, engine_of, loop_of
from tests.support.gguf.deepseek4 import write_deepseek4_gguf
from tests.support.gguf.deepseek4_mtp import tiny_deepseek4_mtp, write_deepseek4_mtp, write_deepseek4_mtp_gguf
from tests.support.models.tiny_models import VOCAB_SIZE

PARTS = {"enorm": "enorm", "hnorm": "hnorm", "fc_embedding": "e_proj", "fc_hidden": "h_proj"}


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


def test_drafts_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_deepseek4_mtp()
    with engine_of(write_deepseek4_mtp(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


def test_a_model_without_layers_of_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4-Pro's own layers all have compressed keys."""
    tiny = tiny_deepseek4_mtp(kinds=["heavily_compressed_attention", "compressed_sparse_attention"])
    with engine_of(write_deepseek4_mtp(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


def test_fp4_and_fp8_as_published(tmp_path: Path) -> None:
    """Each matrix is read as the number that its codes and scales stand for."""
    tiny = tiny_deepseek4_mtp(hidden=256)
    folder = write_deepseek4_mtp(tiny, tmp_path, (128, 128))
    draft = open_model(EngineConfig(model_path=folder, speculative="mtp")).draft
    assert draft is not None
    wanted = {name: one for name, one in tiny.layer.model.state_dict().items() if "lm_head" not in name}
    wanted |= {f"model.layers.0.{ours}.weight": getattr(tiny.layer, theirs).weight for ours, theirs in PARTS.items()}
    del wanted["model.embed_tokens.weight"]
    assert wanted.keys() == draft.model.state_dict().keys()
    experts = "model.layers.0.mlp.experts"
    down, gate_up = wanted.pop(f"{experts}.down_proj"), wanted.pop(f"{experts}.gate_up_proj")
    for name, one in wanted.items():
        assert torch.equal(draft.source.dense(name), one), name
    made = draft.source.experts(experts, ExpertsLayout(len(down), down.shape[1], down.shape[2]))
    assert made.gate is not None
    for number, (gate, up, last) in enumerate(zip(made.gate, made.up, made.down, strict=True)):
        assert torch.equal(torch.cat([dequantize(gate), dequantize(up)]), gate_up[number])
        assert torch.equal(dequantize(last), down[number])


@pytest.mark.parametrize("is_joined", [True, False])
def test_drafts_are_those_of_the_reference_from_a_gguf(
    is_joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = tiny_deepseek4_mtp()
    with engine_of(write_deepseek4_mtp_gguf(tiny, tmp_path / "tiny.gguf", is_joined=is_joined)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


@pytest.mark.exhaustive
def test_drafts_on_a_gpu_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_deepseek4_mtp()
    with engine_of(write_deepseek4_mtp(tiny, tmp_path), fake_hardware(1)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


def test_answers_do_not_depend_on_drafts(tmp_path: Path) -> None:
    """Greedy and sampled."""
    asked: list[dict[str, object]] = [
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 0.9, "top_p": 0.9, "seed": 5},
        {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 6},
    ]
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **one) for one in asked]  # type: ignore[arg-type]
    with engine_of(write_deepseek4_mtp(tiny_deepseek4_mtp(), tmp_path)) as engine:
        plain = told(answers_of(loop_of(engine, max_drafts=0), params, VOCAB_SIZE))
        engine.executor.reset()
        loop = loop_of(engine)
        assert told(answers_of(loop, params, VOCAB_SIZE)) == plain
    assert loop.scheduler.stats().num_drafted > 60


def test_a_dspark_head_in_a_gguf_is_refused(tmp_path: Path) -> None:
    """Which is read from safetensors alone."""
    path = write_deepseek4_gguf(
        tiny_deepseek4_mtp().main,
        tmp_path / "tiny.gguf",
        prediction={"blk.3.nextn.markov_w1.weight": np.ones((160, 8), dtype=np.float32)},
    )
    with pytest.raises(UnsupportedError, match=r"hold a DSpark head, .*--draft_model"), engine_of(path):
        pass
