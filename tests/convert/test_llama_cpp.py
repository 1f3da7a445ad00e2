"""llama.cpp opens what `quantize` writes, and its logits are ours but for the rounding of activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from ktransformers.models.facts import ModelFacts
from ktransformers.weights.gguf.file import open_gguf
from ktransformers.weights.gguf.source import GGUFSource
from tests.support.checks.source_checks import fill
from tests.support.gguf.converting import quantized
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.models.tiny_models import tiny_model, write_safetensors
from tests.support.models.writable_models import WRITTEN

llama_cpp: Any = pytest.importorskip("llama_cpp")

IDS = list(range(300, 348))
MIXTURES = [("f32", 1e-4), ("q8_0", 2e-3), ("q4_k_m", 2e-2), ("iq3_m", 2e-2), ("iq2_xs", 2e-2), ("iq1_m", 2e-2)]


def logits_of(path: Path, ids: list[int] = IDS) -> np.ndarray:
    model = llama_cpp.Llama(str(path), n_ctx=64, n_threads=1, n_gpu_layers=0, logits_all=True, verbose=False)
    try:
        model.eval(ids)
        return np.array(model.scores[: len(ids)], dtype=np.float64)
    finally:
        model.close()


@pytest.mark.parametrize(("mixture", "most"), MIXTURES)
def test_logits_agree(mixture: str, most: float, tmp_path: Path) -> None:
    """KL divergence to transformers in fp32, on the file's own numbers."""
    out = tmp_path / "demo.gguf"
    quantized(DEMO_CHECKPOINT, out, mixture, without_imatrix=True)
    model = AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32)
    fill(model, GGUFSource(open_gguf(out), ModelFacts.of(model.config)))
    with torch.no_grad():
        wanted = model(torch.tensor([IDS])).logits[0].double().log_softmax(-1)
    got = torch.from_numpy(logits_of(out)).log_softmax(-1)
    assert float((wanted.exp() * (wanted - got)).sum(-1).mean()) < most


COMPUTED_OTHERWISE = ("gpt_oss", "phimoe")
"""docs/quantize.md says how."""


@pytest.mark.parametrize(("model_type", "values"), WRITTEN)
def test_it_opens_what_is_written(model_type: str, values: dict[str, object], tmp_path: Path) -> None:
    """And computes the same, up to the tables that it rounds exponentials with."""
    model, ids = tiny_model(model_type, seed=1, **values), list(range(3, 40))
    quantized(write_safetensors(model, tmp_path / "model"), tmp_path / "out.gguf")
    got = logits_of(tmp_path / "out.gguf", ids)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0].double().numpy()
    if model_type not in COMPUTED_OTHERWISE:
        assert float(np.abs(got - want).max()) < 2e-3 * max(float(np.abs(want).max()), 1.0)


def _rms_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias


def _softmax_of_two(router: nn.Linear, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    logits = nn.functional.linear(x, router.weight)
    weights, experts = logits.softmax(-1).topk(2, -1)
    return logits, weights / weights.sum(-1, keepdim=True), experts


def test_what_llama_cpp_computes_otherwise_of_phimoe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is right: with llama.cpp's norm and its router in place of the model's, logits agree."""
    model, ids = tiny_model("phimoe", seed=1), list(range(3, 40))
    quantized(write_safetensors(model, tmp_path / "model"), tmp_path / "out.gguf")
    got = logits_of(tmp_path / "out.gguf", ids)

    def furthest() -> float:
        with torch.no_grad():
            return float(np.abs(model(torch.tensor([ids])).logits[0].double().numpy() - got).max())

    assert furthest() > 1
    monkeypatch.setattr(nn.LayerNorm, "forward", _rms_norm)
    assert furthest() > 1
    monkeypatch.setattr(type(model.model.layers[0].mlp.router), "forward", _softmax_of_two)
    assert furthest() < 2e-3
