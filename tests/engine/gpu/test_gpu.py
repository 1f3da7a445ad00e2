"""Models with layers on a GPU: logits against `transformers` in fp32, and against our own engine on the CPU.

The GPU is made up (fake_gpus.py) and computes in fp32, so that only the order of summation differs and
the tolerance is that of tests/models/test_agreement.py: what is tested is what runs where, and that nothing gets lost.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import CAPTURING
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.errors import CapacityError, ConfigError, RuleError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.scheduler.records import StepPlan
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.fake_operators import inlined_rules
from tests.support.engines.gpu_engines import (
    EXPERTS_ON_CPU,
    EXPERTS_ON_GPU,
    RULES,
    gpu_engine,
    logits_in_steps,
    rules_of,
    sequence_start,
    step_row,
)
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import TOLERANCE, dequantized, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")


ATTENTION = {
    "qwen3_moe": "KAttentionFused",
    "qwen2_moe": "KAttentionFused",
    "mixtral": "KAttentionFused",
    "deepseek_v2": "KMLATriton",
    "deepseek_v3": "KMLATriton",
    "llama": "KAttentionFused",
    "gpt_oss": "KAttentionFused",
    "glm4_moe": "KAttentionFused",
    "granitemoe": "KAttentionFused",
    "dots1": "KAttentionFused",
    "ernie4_5_moe": "KAttentionFused",  # rotates neighbouring columns
    "olmoe": "KAttentionFused",  # normalizes all heads at once
    "minimax_m2": "KAttentionFused",  # as olmoe
    "phimoe": "KAttentionFused",
    "hunyuan_v1_moe": "KAttentionFused",  # normalizes after rotating
}


# Attention like that of families that stay.
LIKE_OTHERS = ("mixtral", "qwen2_moe", "deepseek_v3", "dots1", "minimax_m2", "phimoe", "llama")


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "model_type",
    [pytest.param(name, marks=pytest.mark.exhaustive if name in LIKE_OTHERS else ()) for name in ATTENTION],
)
def test_default_placement_agrees_with_transformers(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    engine = gpu_engine(tmp_path)
    assert {layer_device.device for layer_device in engine.plan.layer_devices} == {"cuda:0"}
    ops = {entry.generate_op for entry in engine.plan.entries if entry.key.endswith("self_attn")}
    assert ops == {ATTENTION[model_type]}
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = logits_in_steps(engine, ids)
    assert got.dtype is torch.float32
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


# Quantized products on a GPU read fp16 activations and, above a few rows, fp16 weights: 2^-11 each per factor, and
# residual streams of two layers with some ten such products raise the walk to below 1 %. Int8 activations of the CPU's
# experts cost more (tests/models/gguf/test_gguf_models.py): 3 %.
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model_type", "qtype"), [("qwen3_moe", "Q8_0"), pytest.param("deepseek_v3", "Q4_0", marks=pytest.mark.exhaustive)]
)
def test_quantized_weights_and_experts_on_the_gpu(model_type: str, qtype: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=3)
    kind = QuantType[qtype]
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    ids = prompt(model.config.vocab_size)
    with torch.no_grad():
        want = dequantized(model, kind, kind)(torch.tensor([ids])).logits[0]
    rules = rules_of(model_type, tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_GPU)
    engine = gpu_engine(path, optimize_config_path=rules)
    ops = {entry.generate_op for entry in engine.plan.entries}
    assert {"KLinearMarlin", "KExpertsMarlin"} <= ops
    # The interpreter takes seconds for each product of few rows: tests/kernels/triton has those.
    got = engine.runner.forward(ids, 0, range(len(ids)))
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    # A row whose router nearly ties may take another expert and differ by more.
    assert errors.median() <= 1e-2
    assert (errors > 1e-2).sum() <= 2


@pytest.mark.exhaustive
def test_layers_spread_over_two_gpus_by_the_transfer_map(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1, layers=3)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    rules = rules_of(
        "qwen3_moe",
        tmp_path,
        "per_layer_prefill_intput_threshold: 0",
        'per_layer_prefill_intput_threshold: 0\n      transfer_map: {1: "cuda:1"}',
    )
    config, graphs = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1), FakeGraphs()
    engine = static_engine(replace(config, optimize_config_path=rules), hardware=fake_hardware(2, graphs=graphs))
    assert [layer_device.device for layer_device in engine.plan.layer_devices] == ["cuda:0", "cuda:1", "cuda:1"]
    assert engine.plan.device_of("model.layers.2.self_attn.q_proj") == "cuda:1"
    total = engine.plan.extra_bytes["kv cache"]
    assert total["cuda:1"] == 2 * total["cuda:0"]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (logits_in_steps(engine, ids) - want).abs().max() <= TOLERANCE * want.abs().max()
    assert graphs.captured == [1]
    assert graphs.replays == 3
    # Of the first step, two captured runs, the prompt and three replays: each GPU hands over its own layers' experts.
    streams = [engine.plan.devices[name].async_cpu_experts() for name in ("cuda:0", "cuda:1")]
    assert [[stream.num_forwards for stream in each] for each in streams] == [[7], [14]]
    engine.close()


LAYER_0_ON_CPU = r"""
- match: {name: '^model\.layers\.0\.mlp\.experts$'}
  replace: {class: ktransformers.operators.experts.KTransformersExperts, kwargs: {generate_device: cpu}}
- match: {name: '^model\.layers\.0\.'}
  replace: {class: default, kwargs: {generate_device: cpu}}
- match: {name: '^model\.layers\.1\..*proj$'}
  replace: {class: default, kwargs: {generate_device: cpu}}
"""


def test_a_layer_and_some_modules_on_the_cpu(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    rules = rules_of("qwen3_moe", tmp_path, "- match", "- match", before=LAYER_0_ON_CPU)
    engine = gpu_engine(tmp_path, optimize_config_path=rules)
    assert [layer_device.device for layer_device in engine.plan.layer_devices] == ["cpu", "cuda:0"]
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (logits_in_steps(engine, ids) - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.exhaustive
def test_sequences_share_steps_on_the_gpu(tmp_path: Path) -> None:
    """Three sequences in one paged prefill and one decode step: greedy tokens are those of `transformers`."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1)
    paged = build_engine(config, page_size=4, max_batch_size=4, hardware=fake_hardware())
    least = sum(nbytes for entry in paged.plan.entries for device, nbytes in entry.nbytes.items() if device != "cpu")
    assert paged.model.card.gpu_bytes > least > 0  # the cache is there, too
    prompts = [prompt(model.config.vocab_size)[:length] for length in (5, 9, 3)]
    tables = [list(range(4 * i, 4 * i + 4)) for i in range(3)]
    starts = [sequence_start(i, ids) for i, ids in enumerate(prompts)]
    rows = [step_row(i, ids, 0, tables[i]) for i, ids in enumerate(prompts)]
    first = paged.executor.execute(StepPlan(step_id=1, ended=[], starts=starts, rows=rows))
    rows = [step_row(i, [first.results[i].token_id], len(ids), tables[i]) for i, ids in enumerate(prompts)]
    second = paged.executor.execute(StepPlan(step_id=2, ended=[], starts=[], rows=rows))
    for i, ids in enumerate(prompts):
        want = model.generate(torch.tensor([ids]), max_new_tokens=2, do_sample=False, pad_token_id=0, eos_token_id=None)
        assert [first.results[i].token_id, second.results[i].token_id] == want[0, len(ids) :].tolist()


def test_decode_steps_are_captured_and_change_nothing(tmp_path: Path) -> None:
    """One sequence, with graphs and without: `==`, and one replay per token. Experts run in the order of the stream."""
    model = tiny_model("qwen3_moe", seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    config, graphs, seen = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1), FakeGraphs(), []
    engine = static_engine(config, lambda *args: seen.append(args), fake_hardware(graphs=graphs))
    assert graphs.captured == [1]
    assert seen[-2:] == [(0, 1, CAPTURING), (1, 1, CAPTURING)]
    got = logits_in_steps(engine, ids)
    assert graphs.replays == 3
    (stream,) = engine.plan.devices.async_cpu_experts()
    # Once in the first step, twice while capturing, once for the prompt and once per replay, in each of two layers.
    assert stream.num_forwards == 2 * (1 + 2 + 1 + 3)
    without = static_engine(replace(config, use_cuda_graph=False), hardware=fake_hardware(graphs=graphs))
    assert torch.equal(logits_in_steps(without, ids), got)
    assert graphs.replays == 3
    engine.close()
    without.close()


@pytest.mark.exhaustive
def test_steps_of_a_batch_are_captured(tmp_path: Path) -> None:
    """Three rows in a graph of four: tokens and counts of experts are those of steps that are not captured."""
    write_safetensors(tiny_model("deepseek_v3", seed=1), tmp_path)
    config, graphs = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1), FakeGraphs()
    results = []
    for use_cuda_graph in (True, False):
        paged = build_engine(
            replace(config, use_cuda_graph=use_cuda_graph),
            page_size=4,
            max_batch_size=4,
            hardware=fake_hardware(graphs=graphs),
        )
        starts = [sequence_start(i, [3 + i, 5, 8 - i]) for i in range(3)]
        rows = [step_row(i, start.token_ids, 0, [i]) for i, start in enumerate(starts)]
        first = paged.executor.execute(StepPlan(step_id=1, ended=[], starts=starts, rows=rows))
        tables = [[i, 4 + i] for i in range(3)]
        rows = [step_row(i, [first.results[i].token_id], 3, tables[i]) for i in range(3)]
        second = paged.executor.execute(StepPlan(step_id=2, ended=[], starts=[], rows=rows))
        results.append([result.token_id for result in (*first.results, *second.results)])
        assert second.experts[0] > 0
        assert second.experts[2] > 0
        paged.close()
    assert results[0] == results[1]
    assert graphs.captured == [4, 2, 1]
    assert graphs.replays == 1


def test_reasons_not_to_capture(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A module that stays on the CPU would make the host wait."""
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    match = "- match: {name: '^model.layers.1.self_attn.q_proj$'}\n"
    rule = match + "  replace: {class: default, kwargs: {generate_device: cpu}}\n"
    rules = rules_of("qwen3_moe", tmp_path, "- match", "- match", before=rule)
    graphs = FakeGraphs()
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    with caplog.at_level(logging.INFO):
        engine = static_engine(config, hardware=fake_hardware(graphs=graphs))
    assert not graphs.captured
    assert "without CUDA graphs: model.layers.1.self_attn.q_proj is on cpu" in caplog.text
    engine.close()


def test_layers_on_the_cpu_are_not_captured(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of two layers, by the transfer_map: prefill and decode steps pass through both devices."""
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    old = "per_layer_prefill_intput_threshold: 0"
    rules = rules_of("qwen3_moe", tmp_path, old, old + "\n      transfer_map: {1: cpu}")
    graphs = FakeGraphs()
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    with caplog.at_level(logging.INFO):
        engine = static_engine(config, hardware=fake_hardware(graphs=graphs))
    assert not graphs.captured
    assert "without CUDA graphs: 1 of 2 layers are on the CPU" in caplog.text
    ids = prompt(model.config.vocab_size)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (logits_in_steps(engine, ids) - want).abs().max() <= TOLERANCE * want.abs().max()
    engine.close()


def test_what_does_not_fit_on_the_gpu_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    write_safetensors(model, tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1)
    small = fake_hardware(gpu_bytes=1 << 16)
    with pytest.raises(CapacityError, match="cuda:0: weights"):
        static_engine(replace(config, use_cuda=True), hardware=small)
    # Unless nobody asked for the GPU, which others may have filled: then the CPU takes it all, and a line says so.
    engine = static_engine(config, hardware=small)
    assert "the GPU is left alone" in caplog.text
    assert "cuda:0: weights" in caplog.text
    assert {entry.placement.generate_device for entry in engine.plan.entries} == {"cpu"}
    assert engine.runner.forward([3, 4, 5], 0, [2]).shape[0] == 1
    engine.close()
    plan = plan_model(config, hardware=fake_hardware())
    assert plan.misfit() is None
    assert set(plan.extra_bytes["workspace"]) == {"cuda:0"}


def test_experts_that_no_gpu_kernel_reads_are_refused(tmp_path: Path) -> None:
    write_safetensors(tiny_model("qwen3_moe", seed=1), tmp_path)
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_GPU)
    config = EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    with pytest.raises((UnsupportedError, RuleError), match="--cpu_quant"):
        plan_model(config, hardware=fake_hardware())
    assert plan_model(replace(config, cpu_quant="q8_0"), hardware=fake_hardware()).misfit() is None


def test_experts_fill_the_budget_from_the_last_layer(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1, layers=4)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1)
    everything = plan_model(config, hardware=fake_hardware())
    experts = [entry for entry in everything.entries if entry.operator == "KTransformersExperts"]
    assert [entry.placement.generate_device for entry in experts] == ["cuda:0"] * 4
    one = experts[0].nbytes["cuda:0"]
    budget = everything.total_bytes["cuda:0"] - 2 * one + one // 2  # room for two layers and a half
    plan = plan_model(replace(config, gpu_memory=budget / 2**30), hardware=fake_hardware())
    placed = [entry for entry in plan.entries if entry.operator == "KTransformersExperts"]
    assert [entry.placement.generate_device for entry in placed] == ["cpu", "cpu", "cuda:0", "cuda:0"]
    assert plan.misfit() is None
    with pytest.raises(ConfigError, match="--gpu_memory"):
        plan_model(replace(config, gpu_memory=-1.0), hardware=fake_hardware())


def test_layers_are_spread_over_gpus_where_that_helps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Four layers: a GPU that holds all keeps them, one that holds the experts of two shares with the other."""
    path = write_gguf(tiny_model("qwen3_moe", seed=1, layers=4), tmp_path / "m.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1)
    everything = plan_model(config, hardware=fake_hardware(2))
    assert [layer_device.device for layer_device in everything.layer_devices] == ["cuda:0"] * 4
    experts = [entry.key for entry in everything.entries if entry.operator == "KTransformersExperts"]
    one = next(entry.nbytes["cuda:0"] for entry in everything.entries if entry.key == experts[0])
    small = fake_hardware(2, gpu_bytes=everything.total_bytes["cuda:0"] - 2 * one + one // 2)
    with caplog.at_level(logging.INFO):
        plan = plan_model(config, hardware=small)
    assert [layer_device.device for layer_device in plan.layer_devices] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert [plan.device_of(key) for key in experts] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert plan.misfit() is None
    assert (
        "spread over the GPUs (CUDA_VISIBLE_DEVICES says which are used): cuda:0 from layer 0 on, cuda:1" in caplog.text
    )
    assert caplog.text.count("go to the GPU") == 1
    # A rule file of the user's says itself where layers go.
    rules = replace(config, optimize_config_path=shipped_path(RULES["qwen3_moe"]))
    assert {layer_device.device for layer_device in plan_model(rules, hardware=small).layer_devices} == {"cuda:0"}


def test_upstreams_files_for_several_gpus_spread_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tiny_model("deepseek_v3", seed=1, layers=4), tmp_path / "m.gguf", QuantType.Q8_0, QuantType.Q8_0)
    rules = Path("ktransformers/optimize/optimize_rules/DeepSeek-V3-Chat-multi-gpu-8.yaml")
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, optimize_config_path=rules)
    with caplog.at_level(logging.INFO):
        plan = plan_model(config, hardware=fake_hardware(2))
    assert [layer_device.device for layer_device in plan.layer_devices] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert "spread over the GPUs" in caplog.text
    one = plan_model(config, hardware=fake_hardware(1))
    assert {layer_device.device for layer_device in one.layer_devices} == {"cuda:0"}


@pytest.mark.every(3)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v2", "gemma3_text"])
def test_rotary_tables_on_a_gpu_are_planned(model_type: str, tmp_path: Path) -> None:
    """They are filled for the longest sequence before the first step."""
    write_safetensors(tiny_model(model_type, seed=1), tmp_path)
    engine = gpu_engine(tmp_path)
    rotary = [op for op in engine.plan.operators.values() if isinstance(op, KRotaryEmbedding)]
    tables = [part for operator in rotary for table in operator._tables.values() for part in table]
    held = sum(part.numel() * part.element_size() for part in tables)
    planned = engine.plan.extra_bytes["rope table"]["cuda:0"]
    assert held <= planned <= 2 * held
    on_cpu = plan_model(EngineConfig(model_path=tmp_path, cache_lens=64, cpu_infer=1), hardware=fake_hardware(0))
    assert "rope table" not in on_cpu.extra_bytes


def test_a_rule_file_is_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However many layers it is for, and however often the model is planned."""
    path = write_gguf(tiny_model("qwen3_moe", seed=1, layers=4), tmp_path / "m.gguf", QuantType.Q8_0, QuantType.Q8_0)
    rules = tmp_path / "optimize_rules" / "Qwen3Moe-multi-gpu.yaml"
    rules.parent.mkdir()
    text = inlined_rules("Qwen3Moe-ktransformers.yaml")
    rules.write_text(text.replace("generate_op: KExpertsCPU", "generate_op: KExpertsCPU\n      backend: AMXInt8"))
    assert "AMXInt8" in rules.read_text()
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1, optimize_config_path=rules, spread_layers=True)
    with caplog.at_level(logging.INFO):
        plan_model(config, hardware=fake_hardware(2))
    assert caplog.text.count("backend has no effect on KTransformersExperts") == 1


def test_a_dense_model_that_one_gpu_cannot_hold_is_spread(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama", seed=1, layers=6), tmp_path / "m.gguf", QuantType.Q8_0, QuantType.Q8_0)
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1)
    whole = plan_model(config, hardware=fake_hardware()).total_bytes["cuda:0"]
    weights = plan_model(config, hardware=fake_hardware()).weight_bytes["cuda:0"]
    plan = plan_model(config, hardware=fake_hardware(3, gpu_bytes=whole - weights // 3))
    assert [layer_device.device for layer_device in plan.layer_devices] == [
        "cuda:0",
        "cuda:0",
        "cuda:1",
        "cuda:1",
        "cuda:2",
        "cuda:2",
    ]
    assert plan.misfit() is None
