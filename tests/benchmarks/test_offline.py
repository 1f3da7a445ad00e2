"""benchmarks.offline and benchmarks.profiling on an invented shape."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import offline, profiling
from benchmarks.peers import whole_layers
from benchmarks.peers.placement import cpu_expert_layers
from benchmarks.peers.work import ModelWork
from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.engine.load.builder import Hardware, plan_model
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.kernels.cpu import limits
from ktransformers.models import synthetic_shapes
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.models.tiny_models import made_shape, tiny_config

EXPERTS, TOP_K, LAYERS, HIDDEN, VOCAB = 32, 2, 4, 256, 4096
DEMO = DEMO_MODEL_PATH / "demo-Q4_K_M.gguf"


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


def test_what_recording_costs(capsys: pytest.CaptureFixture[str]) -> None:
    """Both ways of a step are timed, and compute the same."""
    args = ["--synthetic", "tiny", "--layers", "1", "--steps", "4", "--prompt_len", "3", "--cpu_infer", "1"]
    assert profiling.main(["--log_level", "warning", *args]) == 0
    record = json.loads(capsys.readouterr().out.rstrip("\n").rpartition("\n")[2])
    assert [row["model"] for row in record["rows"]] == ["demo-Q4_K_M.gguf", "tiny, 1 layers"]
    for row in record["rows"]:
        assert row["is_equal"]
        assert row["record_bytes"] > 0
        assert row["ratio"] == pytest.approx(row["on_us"] / row["off_us"])
    assert not record["is_failed"]


def test_the_peer_keeps_in_ram_what_we_do() -> None:
    config = EngineConfig(cache_lens=1024, cpu_infer=1)
    opened = open_synthetic(config, tiny(LAYERS))
    assert cpu_expert_layers(plan_model(config, opened, Hardware(detect_machine(gpus=dict)))) is None
    plan = plan_model(config, opened, fake_hardware())
    experts = [entry for entry in plan.entries if entry.operator == "KTransformersExperts"]
    on_cpu = [i for i, entry in enumerate(experts) if entry.nbytes.get("cpu")]
    assert cpu_expert_layers(plan) == on_cpu
    assert len(experts) == LAYERS
    moved = replace(experts[0], nbytes={"cuda:0": experts[0].total_bytes})
    entries = [moved if entry is experts[0] else entry for entry in plan.entries]
    others = [replace(one, nbytes={"cpu": one.total_bytes}) for one in experts[1:]]
    entries = [next((one for one in others if one.key == entry.key), entry) for entry in entries]
    assert cpu_expert_layers(replace(plan, entries=entries)) == [1, 2, 3]


class FakePeer:
    """Answers each question with a larger figure than the last: the better of two rounds counts."""

    name = "llama.cpp"

    def __init__(self) -> None:
        self.questions: list[str] = []
        self.is_closed = False

    def ask(self, question: str) -> float | None:
        self.questions.append(question)
        return 10.0 * len(self.questions)

    def close(self) -> None:
        self.is_closed = True


def test_a_peer_is_measured_in_turns_and_closed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, started = FakePeer(), list[tuple[Path, int, int, ModelWork, object]]()

    def start(path: Path, threads: int, vocab_size: int, work: ModelWork, cpu_experts: object) -> FakePeer:
        started.append((path, threads, vocab_size, work, cpu_experts))
        return peer

    monkeypatch.setattr(offline, "llama_model_peer", start)
    monkeypatch.setattr(offline, "is_missing", lambda *args: False)
    args = ["--prefill", "8", "--decode", "2", "--max_new_tokens", "2", "--prompt_len", "4", "--seconds", "0"]
    args += ["--cpu_infer", "1", "--log_level", "warning", "--beside", "0", "--no_use_cuda"]
    assert offline.main([*args, "--peer", "llama.cpp"]) == 0
    record = json.loads(capsys.readouterr().out.rstrip("\n").rpartition("\n")[2])
    assert [row["llama.cpp"] for row in record["rows"]] == [20.0, 40.0]
    assert peer.questions == ["prefill 8", "prefill 8", "decode 2", "decode 2"]
    assert peer.is_closed
    assert started == [(DEMO, 1, 2560, ModelWork([8], [2], 2, 4), None)]


def test_a_peer_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert offline.main(["--synthetic", "tiny", "--peer", "llama.cpp"]) == 2
    assert "--peer llama.cpp reads a GGUF file: name one" in capsys.readouterr().err


def test_whole_layers_are_measured_beside_slots(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer gets all flags but its own name, and answers both kinds of questions without slots."""
    started, flags = list[list[str]](), ["--prefill", "8", "--decode", "1", "--max_new_tokens", "2", "--seconds", "0"]
    flags += ["--cpu_infer", "1", "--log_level", "warning", "--beside", "0", "--prompt_len", "4"]
    monkeypatch.setattr(offline, "whole_layers_peer", lambda argv: started.append(list(argv)) or FakePeer())
    assert offline.main([*flags, "--peer", "whole_layers"]) == 2
    assert "--gpu_memory GIB" in capsys.readouterr().err
    assert offline.main([*flags, "--gpu_memory", "1", "--peer", "whole_layers"]) == 0
    assert started == [[*flags, "--gpu_memory", "1"]]
    loaded = list[EngineConfig]()
    load = whole_layers.load_work
    monkeypatch.setattr(whole_layers, "load_work", lambda work: loaded.append(work.config) or load(work))
    answer = whole_layers.figures([*flags, "--hot_experts", "4"])
    rates = [answer(["prefill", "8"]), answer(["decode", "1"])]
    assert all(rate is not None and rate > 0 for rate in rates)
    assert [config.hot_experts for config in loaded] == ["off"]
