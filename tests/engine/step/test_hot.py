"""Models of which some experts have slots on a GPU: plans, results, what is learned, counts.

The GPU is made up (tests/support/engines/fake_gpus.py).
"""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine, plan_model
from ktransformers.errors import CapacityError, ConfigError, KernelError
from ktransformers.optimize.report import print_plan
from ktransformers.optimize.summary import parts_of
from ktransformers.scheduler.records import StepPlan
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, Gpu, rules_of, sequence_start, step_row
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

from ktransformers.engine.model.fingerprint import ModelDigests
from ktransformers.engine.model.hot_file import HotFile
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.step.hot import HotGpu
from ktransformers.operators.experts.gpu_slots import HotPool
from ktransformers.operators.experts.split import NEVER
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.optimize.hot_slots import HOT_EXPERTS
from ktransformers.optimize.streaming import STAGING
from tests.support.engines.inline_device import EagerCopies

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

SLOTS = 5


@pytest.fixture(autouse=True)
def _no_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def calibrate(prefill: ExpertPrefill, *rest: object) -> None:
        prefill.threshold = NEVER

    monkeypatch.setattr("ktransformers.engine.step.expert_streaming.calibrate", calibrate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("qwen3_moe", seed=3), path)
    return path


@pytest.fixture
def config(model_path: Path, tmp_path: Path) -> EngineConfig:
    """The shipped rules, as a file of the user's, so that experts stay on the CPU."""
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_CPU)
    options = {"cache_lens": 64, "cpu_infer": 1, "cpu_quant": "q8_0", "hot_experts": str(SLOTS)}
    return EngineConfig(model_path=model_path, optimize_config_path=rules, **options)  # type: ignore[arg-type]


class HotMachine(Gpu):
    """Its copies are made at once."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = EagerCopies()  # type: ignore[assignment]
        self.graphs = FakeGraphs()


def pool_of(engine: StaticEngine) -> HotPool:
    """The only one of the only GPU."""
    (follower,) = engine.plan.devices["cuda:0"].followers
    assert isinstance(follower, HotGpu)
    (pool,) = follower.pools
    return pool.slots


def test_decoding_gives_what_the_cpu_gives_and_learns(config: EngineConfig, caplog: pytest.LogCaptureFixture) -> None:
    """Fp16 activations on the GPU, int8 ones on the CPU, as in test_expert_streaming.py; slots change meanwhile.

    The next engine begins with what this one has learned.
    """
    gpu, ids = HotMachine(), [5, 9, 5, 9, 3, 5, 9]
    plain = static_engine(replace(config, hot_experts="off"), hardware=fake_hardware())
    assert not plain.plan.devices["cuda:0"].followers
    wants = [plain.runner.forward([token], position, [0]).clone() for position, token in enumerate(ids)]
    plain.close()
    engine = static_engine(config, hardware=gpu.hardware(graphs=gpu.graphs))
    pool = pool_of(engine)
    first = pool.policy.slot_of.copy()
    gots = [engine.runner.forward([token], position, [0]).clone() for position, token in enumerate(ids)]
    errors = [float((got - want).norm() / want.norm()) for got, want in zip(gots, wants, strict=True)]
    assert np.median(errors) <= 3e-2
    assert sum(error > 3e-2 for error in errors) <= 2  # a router that nearly ties may choose otherwise
    assert gpu.graphs.replays == len(ids)
    totals = pool.policy.totals
    assert totals.steps == len(ids) - 1  # the last one is looked at in the next step
    assert 0 < totals.hits < totals.reads
    assert totals.uploads > 0
    assert (pool.policy.slot_of != first).any()
    assert (pool.slot_of.numpy() == pool.policy.slot_of).all()
    scores, file = pool.policy.scores(), HotFile(engine.identified.sampled.digests)
    assert HotFile(ModelDigests.of(open_model(config))).path == file.path  # as planning finds it
    engine.close()
    assert gpu.driver.pinned_ranges == {}
    learned = file.read()
    assert sorted(learned) == [0, 1]  # by layer
    kept = np.stack([learned[0], learned[1]])
    assert np.abs(kept - scores).max() <= 5e-4
    with caplog.at_level(logging.INFO):
        again = static_engine(replace(config, use_cuda_graph=False), hardware=HotMachine().hardware())
    assert "as learned before" in caplog.text
    ordered = sorted(np.ndindex(*kept.shape), key=lambda at: (-kept[at], at[1], at[0]))  # of both layers, in one pool
    there = pool_of(again).policy.slot_of >= 0
    assert {tuple(at) for at in np.argwhere(there).tolist()} == set(ordered[: 2 * SLOTS])
    again.close()


@pytest.mark.parametrize(
    "text",
    ["{", '{"format": 0, "model": "", "scores": {}}', '{"format": 1}', "[]", "NaN", "-1.0", "1e308", "1" + 400 * "0"],
)
def test_files_that_do_not_fit_are_left(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    file = HotFile(ModelDigests("x", "x", "x"), tmp_path)
    assert file.read() == {}
    assert not caplog.records
    file.add({1: np.ones(2)})
    file.add({2: np.zeros(2)})
    assert {layer: scores.tolist() for layer, scores in file.read().items()} == {1: [1.0, 1.0], 2: [0.0, 0.0]}
    is_number = text[-1] in "N08" and text[0] != "{"
    file.path.write_text(file.path.read_text().replace("1.0, 1.0", f"1.0, {text}") if is_number else text)
    assert file.read() == {}
    assert len(caplog.records) == 1


def test_every_gpu_has_a_pool_of_its_own(config: EngineConfig) -> None:
    """Of its own layers; both are counted together."""
    gpu, ids = HotMachine(), [5, 9, 5, 9, 3]
    config = replace(config, spread_layers=True, use_cuda_graph=False)
    plain = static_engine(replace(config, hot_experts="off"), hardware=fake_hardware(num_gpus=2))
    wants = [plain.runner.forward([token], position, [0]).clone() for position, token in enumerate(ids)]
    plain.close()
    engine = static_engine(config, hardware=gpu.hardware(num_gpus=2))
    pools = []
    for name in ("cuda:0", "cuda:1"):
        (follower,) = engine.plan.devices[name].followers
        assert isinstance(follower, HotGpu)
        pools += [(pool.layers, pool.slots.policy) for pool in follower.pools]
    assert [(layers, policy.num_slots) for layers, policy in pools] == [((0,), SLOTS), ((1,), SLOTS)]
    gots = [engine.runner.forward([token], position, [0]).clone() for position, token in enumerate(ids)]
    errors = [float((got - want).norm() / want.norm()) for got, want in zip(gots, wants, strict=True)]
    assert np.median(errors) <= 3e-2
    assert all(policy.totals.steps == len(ids) - 1 for _, policy in pools)
    assert all(0 < policy.totals.hits < policy.totals.reads for _, policy in pools)
    engine.close()
    assert gpu.driver.pinned_ranges == {}


@pytest.mark.exhaustive
def test_counts_and_totals_of_a_step(config: EngineConfig) -> None:
    gpu = HotMachine()
    config = replace(config, use_cuda_graph=False)
    paged = build_engine(config, page_size=4, max_batch_size=4, hardware=gpu.hardware())
    starts = [sequence_start(i, [3 + i, 5]) for i in range(2)]
    rows = [step_row(i, start.token_ids, 0, [i]) for i, start in enumerate(starts)]
    first = paged.executor.execute(StepPlan(step_id=1, ended=[], starts=starts, rows=rows))
    assert first.experts[0] == 2 * 4 * 4  # layers, tokens, experts of each
    more = [step_row(i, [7], 2, [i]) for i in range(2)]
    second = paged.executor.execute(StepPlan(step_id=2, ended=[], starts=[], rows=more))
    assert second.experts[0] == 2 * 2 * 4
    reads, hits, uploads, nbytes = paged.hot.totals()
    assert 0 < hits < reads <= 2 * 4 * 4
    assert tuple(a + b for a, b in zip(first.hot, second.hot, strict=True)) == (reads, hits, uploads, nbytes)
    paged.close()


def test_the_plan_shows_slots_and_bytes(config: EngineConfig) -> None:
    plan = plan_model(config, hardware=fake_hardware())
    without = plan_model(replace(config, hot_experts="off"), hardware=fake_hardware())
    assert HOT_EXPERTS not in without.extra_bytes
    more = plan.total_bytes["cuda:0"] - without.total_bytes["cuda:0"]
    assert more == plan.extra_bytes[HOT_EXPERTS]["cuda:0"] > 0
    (part,) = (part for part in parts_of(plan, {}) if part.name == HOT_EXPERTS)
    assert (part.devices, part.nbytes) == (("cuda:0",), more)
    text = io.StringIO()
    print_plan(plan, Console(file=text, width=300))
    assert HOT_EXPERTS in text.getvalue()
    assert f"{SLOTS} of 8 hot on cuda:0" in text.getvalue()


def test_all_experts_go_whole_where_they_fit(config: EngineConfig) -> None:
    plan = plan_model(replace(config, optimize_config_path=None, hot_experts="auto"), hardware=fake_hardware())
    assert HOT_EXPERTS not in plan.extra_bytes
    places = {entry.placement.generate_device for entry in plan.entries if entry.operator == "KTransformersExperts"}
    assert places == {"cuda:0"}


def test_automatic_slots_take_what_is_left(
    config: EngineConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all layers fit whole: as many slots as there is room for, none where a token needs more.

    Two layers are too few for slots to be worth their hand-overs: that is put aside here.
    """
    monkeypatch.setattr("ktransformers.optimize.hot_slots._MOST_LOSS", 1.0)
    config = replace(config, optimize_config_path=None, hot_experts="auto")
    none = plan_model(replace(config, hot_experts="off"), hardware=fake_hardware())
    whole = [entry for entry in none.entries if entry.operator == "KTransformersExperts"]
    experts = sum(entry.nbytes["cuda:0"] for entry in whole)
    others = none.total_bytes["cuda:0"] - experts
    tight = fake_hardware(gpu_bytes=others + experts * 3 // 4)
    plan = plan_model(config, hardware=tight)
    assert plan.misfit() is None
    assert plan.extra_bytes[HOT_EXPERTS]["cuda:0"] > 0
    assert {e.placement.generate_device for e in plan.entries if e.operator == "KTransformersExperts"} == {"cpu"}
    with caplog.at_level(logging.INFO):
        scarce = plan_model(config, hardware=fake_hardware(gpu_bytes=others + experts // 16))
    assert HOT_EXPERTS not in scarce.extra_bytes
    assert "hot experts get no slots" in caplog.text


def test_more_slots_than_fit_are_refused(config: EngineConfig) -> None:
    config = replace(config, hot_experts="8", chunk_size=64)
    without = plan_model(replace(config, hot_experts="off"), hardware=fake_hardware())
    least = without.total_bytes["cuda:0"] - without.extra_bytes[STAGING]["cuda:0"]
    with pytest.raises(CapacityError, match="cuda:0"):
        plan_model(config, hardware=fake_hardware(gpu_bytes=least + 1000)).check_fits()


def test_a_rule_says_otherwise(config: EngineConfig, tmp_path: Path) -> None:
    text = f"{EXPERTS_ON_CPU}\n      hot_experts: 2"
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, text)
    plan = plan_model(replace(config, optimize_config_path=rules), hardware=fake_hardware())
    assert {e.note for e in plan.entries if "hot on" in e.note} == {
        "2 of 8 hot on cuda:0; streamed to cuda:0 in large steps"
    }
    text = f"{EXPERTS_ON_CPU}\n      hot_experts: most"
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, text)
    with pytest.raises(ConfigError, match="hot_experts"):
        plan_model(replace(config, optimize_config_path=rules), hardware=fake_hardware())


def test_memory_that_cannot_be_pinned(
    config: EngineConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = HotMachine()

    def refuse(address: int, nbytes: int) -> None:
        raise KernelError("no")

    monkeypatch.setattr(gpu.driver, "pin", refuse)
    engine = static_engine(config, hardware=gpu.hardware())
    assert "no experts get slots on cuda:0: their memory cannot be pinned (no)" in caplog.text
    assert not engine.plan.devices["cuda:0"].followers
    engine.close()


@pytest.mark.parametrize("value", ["", "-1", "0", "half", "1.5"])
def test_words_that_are_refused(value: str, config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--hot_experts must be"):
        replace(config, hot_experts=value).resolved()
