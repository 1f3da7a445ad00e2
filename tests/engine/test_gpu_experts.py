"""Models whose experts are on a GPU, or are streamed to one, in the types and forms that experts come in.

The GPU is made up (tests/support/fake_gpus.py) and reads fp16 activations. The oracle is `transformers` in fp32 on the
dequantized weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.builder import Engine, build_engine
from ktransformers.kernels.quant import QuantType
from tests.engine.test_gpu import prompt
from tests.models.test_gguf_models import dequantized, logits_of
from tests.support.fake_gpus import fake_hardware
from tests.support.gguf_writer import write_gguf
from tests.support.tiny_models import tiny_model

pytest.importorskip("triton")

# As in tests/engine/test_gpu.py: fp16 activations and hidden values, 2^-11 each, through two layers.
TOLERANCE = 1e-2


def ops_of(engine: Engine) -> set[tuple[str, str]]:
    """Where the experts are and what runs them, in decode steps."""
    entries = [entry for entry in engine.plan.entries if entry.operator == "KTransformersExperts"]
    return {(entry.placement.generate_device, entry.generate_op) for entry in entries}


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= TOLERANCE
    assert (errors > TOLERANCE).sum() <= 2  # a row whose router nearly ties may take another expert


def test_gpt_oss_with_its_experts_on_the_gpu(tmp_path: Path) -> None:
    """MXFP4, biases, clamped SwiGLU; nobody says where experts go, so they fill the GPU. Prefill and a decode step."""
    model = tiny_model("gpt_oss", seed=3, layers=1)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.MXFP4)
    ids = prompt(model.config.vocab_size)[:12]
    want = logits_of(dequantized(model, QuantType.MXFP4, QuantType.F32), ids)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, use_cuda_graph=False)
    engine = build_engine(config, hardware=fake_hardware())
    assert ops_of(engine) == {("cuda:0", "KExpertsMarlin")}
    first = engine.runner.forward(ids[:-1], 0, range(len(ids) - 1)).clone()
    check(torch.cat([first, engine.runner.forward(ids[-1:], len(ids) - 1, [0])]), want)
    engine.close()
