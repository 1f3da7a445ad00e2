"""On a real GPU, in bf16: logits against our own engine on the CPU, and against `transformers` on the same weights.

bf16 keeps 8 bits: each product's inputs are off by up to 2^-9, some ten products deep a random walk to about 1 % of the
logits' norm; int8 activations of the CPU's kernels cost about as much. 5 % is far from what a wrong kernel does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.engine.builder import Engine, Hardware, build_engine
from ktransformers.kernels.quant import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.engine.test_gpu import EXPERTS_ON_CPU, EXPERTS_ON_GPU, logits_in_steps, prompt, rules_of
from tests.models.test_gguf_models import dequantized
from tests.support.gguf_writer import write_gguf
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOLERANCE = 5e-2


def engine_of(path: Path, *, on_gpu: bool, **settings: object) -> Engine:
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=2, **settings)  # type: ignore[arg-type]
    return build_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory if on_gpu else dict)))


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    # A row whose router nearly ties may take another expert and differ by more.
    assert errors.median() <= TOLERANCE
    assert (errors > TOLERANCE).sum() <= 3


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("qtype", ["Q4_K", "Q8_0"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3", "mixtral"])
def test_quantized_models_agree_with_transformers(model_type: str, qtype: str, where: str, tmp_path: Path) -> None:
    """With routed experts on the CPU, behind copies, and on the GPU."""
    model, kind = tiny_model(model_type, seed=3, hidden=256), QuantType[qtype]
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    experts = EXPERTS_ON_CPU if where == "cpu" else EXPERTS_ON_GPU
    rules = rules_of(model_type, tmp_path, EXPERTS_ON_CPU, experts)
    ids = prompt(model.config.vocab_size)
    with torch.no_grad():
        want = dequantized(model, kind, kind)(torch.tensor([ids])).logits[0]
    check(logits_in_steps(engine_of(path, on_gpu=True, optimize_config_path=rules), ids), want)


def test_the_bundled_model_agrees_with_itself_on_the_cpu() -> None:
    path = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))
    ids = list(range(40, 70))
    gpu, cpu = (logits_in_steps(engine_of(path, on_gpu=on_gpu), ids) for on_gpu in (True, False))
    check(gpu, cpu)
