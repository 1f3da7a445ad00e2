"""Types of few bits on a machine with a GPU: it reads the CPU's tiles of them, in their own bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.kernels.types import QuantType
from ktransformers.operators.experts.paths.resident import ResidentPath
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.optimize.plan import Plan
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, gpu_engine, rules_of
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import dequantized, prompt
from tests.support.models.tiny_models import tiny_model

pytest.importorskip("triton")


def config_of(qtype: QuantType, folder: Path, layers: int = 2) -> EngineConfig:
    path = write_gguf(tiny_model("qwen3_moe", seed=1, hidden=256, layers=layers), folder / "model.gguf", qtype, qtype)
    return EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, use_cuda_graph=False)


def types_of(plan: Plan, part: str) -> set[str]:
    """What the plan says of the modules whose key has `part` in it."""
    return {name for entry in plan.entries if part in entry.key for name in entry.quant_types}


@pytest.mark.parametrize("name", ["Q2_K", "Q3_K", "Q4_1", "NVFP4"])
def test_a_gpu_is_given_the_type_of_the_file(name: str, tmp_path: Path) -> None:
    config = config_of(QuantType[name], tmp_path)
    plan = plan_model(config, hardware=fake_hardware())
    assert types_of(plan, ".q_proj") == types_of(plan, ".mlp.experts") == {name}
    assert {op for entry in plan.entries if ".mlp.experts" in entry.key for op in entry.nbytes} == {"cuda:0"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["Q2_K"])
def test_a_model_of_few_bits_on_the_gpu(name: str, tmp_path: Path) -> None:
    """With all of its experts and linear layers there; the oracle is the same file on the CPU."""
    config = config_of(QuantType[name], tmp_path, 1)
    engine, plain = static_engine(config, hardware=fake_hardware()), static_engine(config, hardware=fake_hardware(0))
    held = [operator for operator in engine.plan.operators.values() if isinstance(operator, KTransformersExperts)]
    found = [path.experts for operator in held if (path := operator.path(ResidentPath)) is not None]
    assert [(gpu.matrices.up.qtype, gpu.matrices.up.layout) for gpu in found] == [
        (QuantType[name], GpuLayout.CPU_PACKED)
    ]
    ids = list(range(3, 12))
    got, want = (each.runner.forward(ids, 0, range(len(ids))).float() for each in (engine, plain))
    # The CPU rounds activations to 8 bits of a block's largest, 2^-8 of it, the GPU's are fp16: through one layer.
    assert (got - want).norm() <= 0.02 * want.norm()
    engine.close()
    plain.close()


@pytest.mark.exhaustive
def test_types_with_a_grid_are_multiplied_in_their_own_bits(tmp_path: Path) -> None:
    """Experts of one, linear layers of another; the oracle is transformers with the file's numbers."""
    model = tiny_model("qwen3_moe", seed=3, hidden=256, num_hidden_layers=1, vocab_size=64)
    of_experts, others = QuantType.IQ2_XXS, QuantType.IQ3_S
    path, ids = write_gguf(model, tmp_path / "model.gguf", of_experts, others), prompt(64, 17)
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_GPU)
    engine = gpu_engine(path, optimize_config_path=rules, use_cuda_graph=False)
    assert (types_of(engine.plan, ".mlp.experts"), types_of(engine.plan, ".q_proj")) == ({"IQ2_XXS"}, {"IQ3_S"})
    experts = next(one for one in engine.plan.operators.values() if isinstance(one, KTransformersExperts))
    resident = experts.path(ResidentPath)
    assert resident is not None
    assert resident.experts.matrices.down.layout is GpuLayout.CPU_PACKED
    with torch.no_grad():
        want = dequantized(model, of_experts, others)(torch.tensor([ids])).logits[0]
    errors = (engine.runner.forward(ids, 0, range(len(ids))) - want).norm(dim=-1) / want.norm(dim=-1)
    engine.close()
    # As in test_gpu.py: a row whose router nearly ties may take another expert and differ by more.
    assert errors.median() <= 1e-2
    assert (errors > 1e-2).sum() <= 2


@pytest.mark.parametrize("name", ["Q3_K", "Q2_K", "Q4_1"])
def test_experts_that_are_streamed_keep_the_type_of_the_file(name: str, tmp_path: Path) -> None:
    """Those that stay on the CPU too."""
    config = config_of(QuantType[name], tmp_path)
    streams = f"{EXPERTS_ON_CPU}\n      prefill_device: cuda"
    for experts in (streams, streams.replace("cuda", "cpu")):
        rules = rules_of("qwen3_moe", tmp_path, streams, experts)
        plan = plan_model(replace(config, optimize_config_path=rules), hardware=fake_hardware())
        assert types_of(plan, ".mlp.experts") == {name}
        assert types_of(plan, "embed_tokens") == {name}
