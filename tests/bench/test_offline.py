"""`bench offline` on an invented shape: its figures against each other and against what even routing touches."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ktransformers.bench.offline.measure import SPARE_BYTES, fitting_layers
from ktransformers.bench.offline.runs import StepWeights
from ktransformers.cli import main
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu import limits
from ktransformers.models import synthetic_shapes
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan
from tests.support.models.pooled_models import pooled_config
from tests.support.models.tiny_models import made_shape, tiny_config

EXPERTS, TOP_K, LAYERS, HIDDEN, VOCAB = 32, 2, 4, 256, 4096


def tiny(layers: int) -> Any:
    return tiny_config(
        "qwen3_moe", hidden=HIDDEN, layers=layers, num_experts=EXPERTS, num_experts_per_tok=TOP_K, vocab_size=VOCAB
    )


@pytest.fixture(autouse=True)
def tiny_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The shape of these tests among those that --synthetic knows; nobody waits for the machine's limits."""
    monkeypatch.setitem(synthetic_shapes.SHAPES, "tiny", made_shape("tiny", LAYERS, tiny))
    measure = limits.read_bandwidth
    monkeypatch.setattr(limits, "read_bandwidth", lambda pool: measure(pool, nbytes=1 << 20, repeats=1))


def bench(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, dict[str, Any]]:
    """Text and JSON of one run."""
    quick = ("--seconds", "0", "--cpu_infer", "1", "--log_level", "warning", "--beside", "0", *args)
    assert main(["bench", "offline", *quick]) == 0
    out = capsys.readouterr().out
    text, _, last = out.rstrip("\n").rpartition("\n")
    return text, json.loads(last)


def even(num_tokens: int) -> tuple[float, float]:
    """Mean and variance bound of the distinct experts of one layer.

    Whether an expert is hit is a coin; the coins of a layer's experts are negatively correlated, so that the variance
    of their sum is at most the sum of their variances.
    """
    missed = (1 - TOP_K / EXPERTS) ** num_tokens
    return EXPERTS * (1 - missed), EXPERTS * missed * (1 - missed)


def test_figures_of_a_synthetic_shape(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--prefill", "32,256", "--decode", "1,8", "--max_new_tokens", "8", "--prompt_len", "5"]
    text, result = bench(capsys, "--synthetic", "tiny", "--layers", str(LAYERS), *args)
    rows = {(row["phase"], row["tokens"]): row for row in result["rows"]}
    assert list(rows) == [("prefill", 32), ("prefill", 256), ("decode", 1), ("decode", 8)]
    assert all(row["tokens_per_s"] > 0 and row["gb_s"] > 0 and row["passes"] == 1 for row in rows.values())
    for line in rows:
        assert any(shown.split()[:2] == [line[0], str(line[1])] for shown in text.splitlines())
    machine, memory = result["machine"], result["memory"]
    assert machine["threads"] == 1
    assert machine["read_bandwidth_gb_s"] > 0
    assert result["load"]["ram_peak_gb"] > 0
    assert memory["ram_peak_gb"] > 0
    assert (memory["vram_peak_gb"] is None) == (not machine["gpus"])
    # Tokens, steps and time belong together.
    for (phase, size), row in rows.items():
        per_step = size if phase == "decode" else size / math.ceil(size / 512)
        assert row["tokens_per_s"] * row["ms_per_step"] == pytest.approx(1e3 * per_step)
    # When every expert is touched, a step reads all weights but the embedding table: 144 bytes are 256 weights.
    full = rows["prefill", 256]
    assert full["distinct_experts"] == EXPERTS
    nbytes = sum(result["model"]["weight_bytes"].values()) - VOCAB * HIDDEN // 256 * 144
    assert full["gb_s"] * full["ms_per_step"] == pytest.approx(nbytes / 1e6)


def test_decode_behind_contexts_of_several_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--prefill", "8", "--decode", "1,2", "--max_new_tokens", "2", "--prompt_len", "5,40"]
    text, result = bench(capsys, "--synthetic", "tiny", "--layers", "1", *args)
    found = [(row["tokens"], row["context"]) for row in result["rows"]]
    assert found == [(8, None), (1, 5), (2, 5), (1, 40), (2, 40)]
    assert "decode after 5 and 40 tokens" in text


def test_routing_can_be_skewed(capsys: pytest.CaptureFixture[str]) -> None:
    """Of few picks the most used quarter has more than its share by chance: even ones show how much."""
    args = ["--synthetic", "tiny", "--prefill", "8", "--decode", "8", "--max_new_tokens", "24", "--prompt_len", "4"]
    text, skewed = bench(capsys, *args, "--routing", "skewed")
    assert skewed["settings"]["routing"] == "skewed"
    assert 0.6 < skewed["quarter_share"] < 0.8
    assert f"{100 * skewed['quarter_share']:.0f} % of the picks" in text
    _, even = bench(capsys, *args)
    assert 0.25 < even["quarter_share"] < 0.45


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--synthetic", "tiny", "--layers", "1", "--prefill", "8", "--decode", "1", "--max_new_tokens", "2"]
    text, result = bench(capsys, *args, "--json")
    assert text == ""
    assert result["bench"] == "offline"


def test_routing_is_even(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "--synthetic",
        "tiny",
        "--prefill",
        "16,32",
        "--decode",
        "1,4,8",
        "--max_new_tokens",
        "8",
        "--prompt_len",
        "4",
    ]
    _, result = bench(capsys, *args)
    for row in result["rows"]:
        mean, variance = even(row["tokens"])
        assert row["even_experts"] == pytest.approx(mean)
        num_samples = LAYERS * (8 if row["phase"] == "decode" else 1)
        # Within five standard deviations; tokens that all went the same way would touch TOP_K.
        margin = 5 * math.sqrt(variance / num_samples)
        assert abs(row["distinct_experts"] - mean) <= margin
        assert row["tokens"] == 1 or mean - margin > TOP_K


def test_a_stream_beside_a_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--synthetic", "tiny", "--layers", "1", "--prefill", "8", "--decode", "1", "--max_new_tokens", "2"]
    text, result = bench(capsys, *args, "--beside", "300", "--max_itl_ratio", "0")
    figure = result["stream"]
    assert (figure["prompt_len"], figure["max_itl_ratio"], figure["chunk"]) == (300, 0.0, 300)
    assert figure["ratio"] == figure["beside_ms"] / figure["alone_ms"]
    assert figure["worst_ratio"] == figure["beside_worst_ms"] / figure["alone_ms"]
    assert 0 < figure["beside_ms"] <= figure["beside_worst_ms"]
    assert figure["first_token_ms"] > 0
    assert "no limit); 300 tokens of the prompt a step" in text
    _, result = bench(capsys, *args, "--beside", "300", "--max_itl_ratio", "1.0001")
    assert 0 < result["stream"]["chunk"] < 300
    text, result = bench(capsys, *args, "--beside", "2000")
    assert result["stream"] is None
    assert "a stream beside a prompt of 2000 tokens is left out: the model's context is 512 tokens" in text


def test_long_prompts_run_in_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--synthetic", "tiny", "--layers", "1", "--prefill", "40", "--decode", "1", "--chunk_size", "16"]
    text, result = bench(capsys, *args, "--max_new_tokens", "2")
    row = result["rows"][0]
    assert row["tokens_per_s"] * 3 * row["ms_per_step"] == pytest.approx(1e3 * 40)
    assert row["even_experts"] == pytest.approx(sum(even(count)[0] for count in (16, 16, 8)) / 3)
    assert (result["settings"]["chunk_size"], result["model"]["layers"]) == (16, 1)
    assert "chunks of 16 tokens" in text


def test_a_model_of_files(capsys: pytest.CaptureFixture[str]) -> None:
    """The bundled one; prompts beyond its context are left out, and a line says so."""
    text, result = bench(capsys, "--prefill", "8,1000000", "--decode", "2", "--max_new_tokens", "2")
    assert [(row["phase"], row["tokens"]) for row in result["rows"]] == [("prefill", 8), ("decode", 2)]
    assert "prefill of 1000000 tokens is left out" in text
    assert "GGUF" in result["model"]["description"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--synthetic", "gpt-5"], "--synthetic gpt-5 is not one of "),
        (["--synthetic", "tiny", "--layers", "5"], "--layers 5: tiny has 1 to 4 layers"),
        (["--synthetic", "tiny", "--layers", "0"], "--layers 0: tiny has 1 to 4 layers"),
        (["--layers", "2"], "--layers cuts a --synthetic shape"),
        (["--synthetic", "tiny", "."], "--synthetic needs no model"),
        (["--synthetic", "tiny", "--model_path", "."], "--synthetic needs no model"),
        (["nowhere.gguf"], "nowhere.gguf does not exist"),
        ([".", "--gguf_path", ".", "--model_path", "."], "MODEL, --model_path and --gguf_path together"),
        (["--prefill", "1,x"], "--prefill must be positive numbers"),
        (["--decode", "0"], "--decode must be positive numbers"),
        (["--routing", "skewed"], "--routing makes the routers of a --synthetic shape"),
        (["--prompt_len", "64,0"], "--prompt_len must be positive numbers"),
        (["--beside", "-1"], "--beside must be at least 0"),
        (["--max_itl_ratio", "1"], "--max_itl_ratio must be more than 1, or 0 for no limit"),
        (["--seconds", "-1"], "--seconds must be at least 0"),
        (["--synthetic", "tiny", "--chunk_size", "-1"], "--chunk_size must be at least 0"),
        (["--synthetic", "tiny", "--cache_lens", "100"], "--cache_lens 100 is too small: these figures need 2048"),
        (["--synthetic", "tiny", "--optimize_config_path", "nowhere"], "--optimize_config_path nowhere does not exist"),
        (["--synthetic", "tiny", "--prompt_len", "500"], "beyond the model's context of 512 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert main(["bench", "offline", *args]) == 2
    assert message in capsys.readouterr().err


def test_random_weights_come_from_no_files() -> None:
    with pytest.raises(ConfigError, match="leave the model's path out"):
        open_synthetic(EngineConfig(gguf_path=Path("x.gguf")), tiny(1))


def tiny_plan(layers: int, capacity: int) -> Plan:
    config = EngineConfig(cache_lens=1024, cpu_infer=1)
    plan = plan_model(config, open_synthetic(config, tiny(layers)))
    return replace(plan, machine=Machine(capacity, capacity, {"cpu": capacity}))


def test_tables_of_which_a_token_reads_few_rows_are_not_read_in_a_step() -> None:
    """Made-up weights are all in RAM, tables of n-grams as well."""
    config = EngineConfig(cache_lens=512, cpu_infer=1)
    plan = plan_model(config, open_synthetic(config, pooled_config("qwen4_exp_text")))
    tables = sum(entry.looked_up.get("cpu", 0) for entry in plan.entries)
    embedding = next(entry.total_bytes for entry in plan.entries if entry.key == "model.embed_tokens")
    assert tables > 0
    weights = StepWeights.of_plan(plan)
    everything = weights.touched(weights.num_experts)
    assert everything == pytest.approx(sum(entry.total_bytes for entry in plan.entries) - tables - embedding)


def test_as_many_layers_as_fit() -> None:
    """Against plans of models that have no more layers."""
    held = [tiny_plan(layers, 0).total_bytes["cpu"] for layers in range(1, LAYERS + 1)]
    one_layer = held[1] - held[0]
    for layers, nbytes in enumerate(held, start=1):
        # A layer's share of the cache is counted with it, so at most a byte per layer is lost to rounding.
        needed = nbytes + one_layer + SPARE_BYTES
        assert fitting_layers(tiny_plan(LAYERS, needed + LAYERS)) == layers
        assert fitting_layers(tiny_plan(LAYERS, needed - 1 - LAYERS)) == max(layers - 1, 1)
    assert fitting_layers(tiny_plan(LAYERS, 0)) == 1


def test_what_does_not_fit_is_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.bench.offline.measure.fitting_layers", lambda plan: 2)
    args = ["--synthetic", "tiny", "--prefill", "4", "--decode", "1", "--max_new_tokens", "2"]
    text, result = bench(capsys, *args)
    assert text.startswith("tiny: 2 of 4 layers fit into memory")
    assert result["model"]["layers"] == 2
