"""`--cpu_bf16 fp32` through a whole engine: BF16 weights as processors without products of bf16 multiply them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import Isa, base
from ktransformers.kernels.types import PackedTensor, QuantType, RawTensor
from ktransformers.operators.linear.linear import KTransformersLinear
from tests.support.engines.one_sequence import static_engine
from tests.support.models.tiny_models import tiny_model, write_safetensors

PROMPT = [7 * i % 150 + 5 for i in range(40)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 MoE in BF16 whose matrices all have whole tiles."""
    model = tiny_model("qwen3_moe", hidden=256)
    return write_safetensors(model.to(torch.bfloat16), tmp_path_factory.mktemp("bf16"))


def logits_of(model_path: Path, cpu_bf16: str) -> tuple[torch.Tensor, set[str]]:
    """And the names of the linear layers and experts that are repacked."""
    engine = static_engine(EngineConfig(model_path=model_path, cpu_infer=2, cache_lens=64, cpu_bf16=cpu_bf16))
    try:
        repack_on_device = {key.rpartition(".")[2] for key, one in engine.plan.operators.items() if is_packed(one)}
        return engine.runner.forward(PROMPT, 0, range(len(PROMPT))), repack_on_device
    finally:
        engine.close()


def is_packed(operator: object) -> bool:
    if isinstance(operator, KTransformersLinear):
        assert isinstance(operator._weight, RawTensor | PackedTensor)
        assert operator._weight.qtype is QuantType.BF16
        return isinstance(operator._weight, PackedTensor)
    kernel = getattr(operator, "kernel", None)
    return kernel is not None and isinstance(kernel.weights.up[0], PackedTensor)


def test_fp32_is_what_other_processors_compute(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def use(isa: Isa) -> None:
        for module in (cpu, base):
            monkeypatch.setattr(module, "active_isa", lambda: isa)

    use(Isa.SCALAR)
    want, repack_on_device = logits_of(model_path, "bf16")
    assert not repack_on_device
    use(Isa.AVX512_BF16_EMULATED)
    got, repack_on_device = logits_of(model_path, "fp32")
    assert not repack_on_device
    assert torch.equal(got, want)
    rounded, repack_on_device = logits_of(model_path, "bf16")
    assert repack_on_device == {"experts", "lm_head"}  # and no projection of attention
    assert not torch.equal(rounded, want)
