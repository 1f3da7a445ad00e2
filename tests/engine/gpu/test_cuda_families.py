"""Every family on a real GPU: as the default placement puts it, and with its experts on the CPU, as its rule file does.

The oracle and the tolerance are those of tests/engine/gpu/test_cuda.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware, plan_model
from ktransformers.errors import CapacityError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.cuda_engines import check, engine_of
from tests.support.engines.gpu_engines import RULES, logits_in_steps, rules_of
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import dequantized, prompt
from tests.support.models.fp8_models import write_both, write_published
from tests.support.models.tiny_models import MODEL_TYPES, WINDOW, tiny_model, write_safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

FAMILY_RULES = {
    **RULES,
    "deepseek_v2": "DeepSeek-V2-Chat.yaml",
    "qwen2_moe": "Qwen2-57B-A14B-Instruct.yaml",
    "glm4_moe": "Glm4Moe.yaml",
    "dots1": "Dots1.yaml",
    "ernie4_5_moe": "Ernie4_5_Moe.yaml",
    "hunyuan_v1_moe": "Hunyuan-A13B.yaml",
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_default_placement_agrees_with_transformers(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=2)
    with closing(static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
        assert {layer_device.device for layer_device in engine.plan.layer_devices} == {"cuda:0"}
        check(logits_in_steps(engine, ids), want)


@pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING, reason="this transformers has no DeepSeek-V4")
@pytest.mark.parametrize("rules", [None, "DeepSeek-V4.yaml"])
def test_compressed_keys_agree_with_transformers(rules: str | None, tmp_path: Path) -> None:
    """Prompts of three windows, with more entries than are chosen; experts of bf16 in VRAM, and on the CPU.

    All entries but one are chosen: of a choice between many that score nearly the same, bf16 would make another one.
    """
    model = tiny_model("deepseek_v4", seed=3, layers=3, index_topk=11)
    ids = prompt(model.config.vocab_size, 3 * WINDOW + 3)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    write_safetensors(model.bfloat16(), tmp_path)
    where = {} if rules is None else {"optimize_config_path": shipped_path(rules)}
    for graphs in (True, False):
        config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=2, use_cuda_graph=graphs, **where)
        with closing(static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
            experts = {e.placement.generate_device for e in engine.plan.entries if e.key.endswith("experts")}
            assert ("cpu" in experts) == (rules is not None)
            assert {layer_device.device for layer_device in engine.plan.layer_devices} == {"cuda:0"}
            check(logits_in_steps(engine, ids), want)


@pytest.mark.skipif("deepseek_v4" not in CONFIG_MAPPING, reason="this transformers has no DeepSeek-V4")
@pytest.mark.parametrize("rules", [None, "DeepSeek-V4.yaml"])
@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_published_deepseek_v4(block: tuple[int, int], rules: str | None, tmp_path: Path) -> None:
    """FP4 experts and FP8 matrices as they are stored; experts in VRAM, and on the CPU."""
    model = tiny_model("deepseek_v4", seed=3, layers=3, hidden=256, index_topk=11)
    write_published(model, tmp_path, block)
    ids = prompt(model.config.vocab_size, 3 * WINDOW + 3)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    where = {} if rules is None else {"optimize_config_path": shipped_path(rules)}
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=2, **where)
    with closing(static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
        experts = {e.placement.generate_device for e in engine.plan.entries if e.key.endswith("experts")}
        assert ("cpu" in experts) == (rules is not None)
        check(logits_in_steps(engine, ids), want)


@pytest.mark.parametrize("model_type", FAMILY_RULES)
def test_rule_files_agree_with_transformers(model_type: str, tmp_path: Path) -> None:
    model, kind = tiny_model(model_type, seed=3, hidden=256), QuantType.Q4_K
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    ids = prompt(model.config.vocab_size)
    with torch.no_grad():
        want = dequantized(model, kind, kind)(torch.tensor([ids])).logits[0]
    rules = shipped_path(FAMILY_RULES[model_type])
    with closing(engine_of(path, on_gpu=True, optimize_config_path=rules)) as engine:
        assert {e.placement.generate_device for e in engine.plan.entries if e.key.endswith("experts")} >= {"cpu"}
        check(logits_in_steps(engine, ids), want)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "qwen3_moe"])
def test_fp8_weights_are_those_of_bf16(model_type: str, tmp_path: Path) -> None:
    _, vocab_size = write_both(model_type, tmp_path / "fp8", tmp_path / "bf16")
    ids, logits = prompt(vocab_size), []
    for name in ("fp8", "bf16"):
        config = EngineConfig(model_path=tmp_path / name, cache_lens=64, cpu_infer=2)
        with closing(static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
            logits.append(logits_in_steps(engine, ids))
    check(*logits)


@pytest.fixture
def full_gpu() -> Iterator[None]:
    """A GPU of which others have taken all but a little."""
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free - (600 << 20), 0), dtype=torch.uint8, device="cuda")
    yield
    del taken
    torch.cuda.empty_cache()


@pytest.mark.usefixtures("full_gpu")
def test_a_full_gpu_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Unless it is asked for: then the plan is refused."""
    path = write_gguf(
        tiny_model("qwen3_moe", seed=3, hidden=256, max_position_embeddings=1 << 20),
        tmp_path / "m.gguf",
        QuantType.Q4_K,
        QuantType.Q4_K,
    )
    config = EngineConfig(gguf_path=path, cache_lens=1 << 20, cpu_infer=2)
    hardware = Hardware(detect_machine(gpus=cuda_memory))
    with caplog.at_level(logging.WARNING):
        plan = plan_model(config, hardware=hardware)
    assert "the GPU is left alone" in caplog.text
    assert {layer_device.device for layer_device in plan.layer_devices} <= {"cpu"}
    with pytest.raises(CapacityError, match="cuda:0"):
        static_engine(replace(config, use_cuda=True), hardware=hardware).close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_layers_spread_over_two_gpus_by_the_transfer_map(
    model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts on the CPU: those of each layer are handed over by the GPU that the layer is on. One graph spans both."""
    model, kind = tiny_model(model_type, seed=3, hidden=256, layers=3), QuantType.Q4_K
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    old = "per_layer_prefill_intput_threshold: 0"
    rules = rules_of(model_type, tmp_path, old, old + '\n      transfer_map: {1: "cuda:1"}')
    ids = prompt(model.config.vocab_size)
    with torch.no_grad():
        want = dequantized(model, kind, kind)(torch.tensor([ids])).logits[0]
    results = []
    for graphs in (True, False):
        with (
            caplog.at_level(logging.INFO),
            closing(engine_of(path, on_gpu=True, optimize_config_path=rules, use_cuda_graph=graphs)) as engine,
        ):
            assert [layer_device.device for layer_device in engine.plan.layer_devices] == ["cuda:0", "cuda:1", "cuda:1"]
            results.append(logits_in_steps(engine, ids))
            ids[-1] += 1  # what a graph reads is a step's own
            results.append(logits_in_steps(engine, ids))
            ids[-1] -= 1
    assert "captured CUDA graphs for batch sizes 1, " in caplog.text
    check(results[0], want)
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])
