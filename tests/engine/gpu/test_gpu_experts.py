"""Models whose experts are on a GPU, or are streamed to one, in the types and forms that experts come in.

The GPU is made up (fake_gpus.py) and reads fp16 activations. The oracle is `transformers` in fp32 on the
dequantized weights.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from ktransformers.config import EngineConfig
from ktransformers.engine.step import expert_streaming as prefill_module
from ktransformers.kernels.types import QuantType
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.optimize.streaming import STAGING
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import Gpu
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models import few_bits
from tests.support.models.agreement import dequantized, logits_of, prompt
from tests.support.models.fp8_models import write_both
from tests.support.models.tiny_models import tiny_model

pytest.importorskip("triton")

# As in tests/engine/gpu/test_gpu.py: fp16 activations and hidden values, 2^-11 each, through two layers.
TOLERANCE = 1e-2


def ops_of(engine: StaticEngine) -> set[tuple[str, str]]:
    """Where the experts are and what runs them, in decode steps."""
    entries = [entry for entry in engine.plan.entries if entry.operator == "KTransformersExperts"]
    return {(entry.placement.generate_device, entry.generate_op) for entry in entries}


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= TOLERANCE
    assert (errors > TOLERANCE).sum() <= 2  # a row whose router nearly ties may take another expert


def streamed(monkeypatch: pytest.MonkeyPatch, **settings: object) -> tuple[StaticEngine, Gpu]:
    """An engine whose experts are on the CPU, and of which prefill steps stream all: the CPU is said to be slow."""
    slow = CpuRate((1,), (100.0,))

    def calibrate(prefill: ExpertPrefill, *args: object) -> None:
        prefill.rates, prefill.threshold = PrefillRates(1e-3, 0.0, slow, slow), 2

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)
    gpu = Gpu()
    config = EngineConfig(
        optimize_config_path=shipped_path("default-moe.yaml"),
        cache_lens=64,
        cpu_infer=1,
        use_cuda_graph=False,
        **settings,
    )  # type: ignore[arg-type]
    engine = static_engine(config, hardware=gpu.hardware())
    assert ops_of(engine) == {("cpu", "KExpertsCPU")}
    return engine, gpu


@pytest.mark.exhaustive
def test_gpt_oss_with_its_experts_on_the_gpu(tmp_path: Path) -> None:
    """MXFP4, biases, clamped SwiGLU; nobody says where experts go, so they fill the GPU."""
    model = tiny_model("gpt_oss", seed=3, layers=1)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.MXFP4)
    ids = prompt(model.config.vocab_size)
    want = logits_of(dequantized(model, QuantType.MXFP4, QuantType.F32), ids)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, use_cuda_graph=False)
    engine = static_engine(config, hardware=fake_hardware())
    assert ops_of(engine) == {("cuda:0", "KExpertsMarlin")}
    # The interpreter takes a minute for a step of up to 16 rows: tests/kernels/triton has those.
    check(engine.runner.forward(ids, 0, range(len(ids))), want)
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
def test_gpt_oss_with_its_experts_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_oss", seed=3, layers=1)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.MXFP4)
    ids = prompt(model.config.vocab_size)
    want = logits_of(dequantized(model, QuantType.MXFP4, QuantType.F32), ids)
    engine, gpu = streamed(monkeypatch, gguf_path=path)
    staged = engine.plan.extra_bytes[STAGING]["cuda:0"]
    (stream,) = engine.plan.devices["cuda:0"].services
    biases = sum(bias.numel() for bias in stream.prefill._layers[0].epilogue.biases)
    assert biases == 8 * (96 + 96 + 64)
    buffers = stream.prefill._staging.size
    assert staged == buffers.total_nbytes + stream.prefill.shape.workspace_nbytes() + 4 * biases
    check(engine.runner.forward(ids, 0, range(len(ids))), want)
    assert gpu.copies.num_copies > 0
    engine.close()


@pytest.mark.every(3)
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_unquantized_experts(kind: str, is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU, and streamed to it out of memory of their own rather than the file's."""
    model = tiny_model("qwen3_moe", seed=3, layers=1)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType[kind])
    ids = prompt(model.config.vocab_size)
    want = logits_of(dequantized(model, QuantType[kind], QuantType.F32), ids)
    if is_streamed:
        engine, gpu = streamed(monkeypatch, gguf_path=path)
    else:
        config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, use_cuda_graph=False)
        engine = static_engine(config, hardware=fake_hardware())
        assert ops_of(engine) == {("cuda:0", "KExpertsMarlin")}
    check(engine.runner.forward(ids, 0, range(len(ids))), want)
    assert not is_streamed or gpu.copies.num_copies > 0
    engine.close()


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_fp8_experts(is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_both("qwen3_moe", tmp_path / "fp8", tmp_path / "bf16", hidden=128, layers=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32)
    ids = prompt(model.config.vocab_size)
    want = logits_of(model, ids)
    if is_streamed:
        engine, gpu = streamed(monkeypatch, model_path=tmp_path / "fp8")
    else:
        config = EngineConfig(model_path=tmp_path / "fp8", cache_lens=64, cpu_infer=1, use_cuda_graph=False)
        engine = static_engine(config, hardware=fake_hardware())
        assert ops_of(engine) == {("cuda:0", "KExpertsMarlin")}
    check(engine.runner.forward(ids, 0, range(len(ids))), want)
    assert not is_streamed or gpu.copies.num_copies > 0
    engine.close()


@pytest.mark.exhaustive
def test_weights_in_groups_are_on_the_gpu_in_their_own_bits(tmp_path: Path) -> None:
    write_few = {f"experts.{e}.{part}_proj.weight": few_bits.int4 for e in range(8) for part in ("gate", "up", "down")}
    write_few["self_attn.o_proj.weight"] = few_bits.fp8_by_row
    config: dict[str, object] = {"quant_method": "compressed-tensors"}
    few, wide = tmp_path / "few", tmp_path / "wide"
    size = few_bits.write_both("qwen3_moe", few, wide, config, write_few, layers=1)
    ids = prompt(size)
    engine = static_engine(
        EngineConfig(model_path=few, cache_lens=64, cpu_infer=1, use_cuda_graph=False), hardware=fake_hardware()
    )
    assert ops_of(engine) == {("cuda:0", "KExpertsMarlin")}
    (experts,) = (entry for entry in engine.plan.entries if entry.operator == "KTransformersExperts")
    assert experts.nbytes == {"cuda:0": 8 * 3 * 256 * (256 // 2 + 256 // 32 * 2)}
    check(engine.runner.forward(ids, 0, range(len(ids))), logits_of(AutoModelForCausalLM.from_pretrained(wide), ids))
    engine.close()
