"""The list of ways to compute routed experts: which a layer has, which takes a step, and one more in front of them.

Operators are those of small engines on a made-up GPU (tests/support/engines/fake_gpus.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.step import expert_streaming
from ktransformers.engine.verify.layer_kinds import layer_kinds
from ktransformers.kernels.triton.common.compiling import warmup
from ktransformers.kernels.triton.quant.repack import GpuLayout
from ktransformers.operators.base import OperatorRuntime, Requirements
from ktransformers.operators.experts import routed
from ktransformers.operators.experts.paths.base import ExpertStep, LayerExperts
from ktransformers.operators.experts.paths.hot import HotPath
from ktransformers.operators.experts.paths.native import NativePath
from ktransformers.operators.experts.paths.resident import ResidentPath
from ktransformers.operators.experts.paths.stream_order import StreamOrderPath
from ktransformers.operators.experts.paths.streamed import StreamedPath
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.weights.source import WeightSource
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, Gpu, rules_of
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

TOP_K, THRESHOLD = 4, 8
FLAT = CpuRate((1,), (1e-3,))


@pytest.fixture(autouse=True)
def _given_rates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def calibrate(prefill: ExpertPrefill, *rest: object) -> None:
        prefill.rates, prefill.threshold = PrefillRates(1e-3, 0.0, FLAT, FLAT), max(THRESHOLD, prefill.least_rows)

    monkeypatch.setattr(expert_streaming, "calibrate", calibrate)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("qwen3_moe", seed=3), path)
    return path


Make = Callable[..., StaticEngine]


@pytest.fixture
def make(model_path: Path, tmp_path: Path) -> Iterator[Make]:
    """An engine with its experts in a place: "cpu" for a machine without a GPU, "gpu" on one, "beside" one."""
    made: list[StaticEngine] = []

    def engine_of(place: str, hot_experts: str = "off", is_streamed: bool = True) -> StaticEngine:
        config = config_of(model_path, tmp_path, place, hot_experts)
        gpu = Gpu()
        hardware = gpu.hardware() if is_streamed else fake_hardware(num_gpus=int(place != "cpu"))
        made.append(static_engine(config, hardware=hardware))
        return made[-1]

    yield engine_of
    for engine in made:
        engine.close()


def config_of(model_path: Path, folder: Path, place: str, hot_experts: str = "off") -> EngineConfig:
    rules = rules_of("qwen3_moe", folder, EXPERTS_ON_CPU, EXPERTS_ON_GPU if place == "gpu" else EXPERTS_ON_CPU)
    options = {"cache_lens": 64, "cpu_infer": 1, "cpu_quant": "q8_0", "use_cuda_graph": False, "self_check": False}
    return EngineConfig(model_path=model_path, optimize_config_path=rules, hot_experts=hot_experts, **options)  # type: ignore[arg-type]


def experts_of(engine: StaticEngine) -> list[KTransformersExperts]:
    return [one for one in engine.plan.operators.values() if isinstance(one, KTransformersExperts)]


def step_of(experts: KTransformersExperts, rows: int, seed: int = 0) -> ExpertStep:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, experts.num_experts, generator=generator).argsort(1)[:, :TOP_K].contiguous()
    hidden = torch.randn(rows, experts.layout.hidden_size, generator=generator)
    return ExpertStep(hidden, ids, torch.rand(rows, TOP_K, generator=generator))


def run(experts: KTransformersExperts, step: ExpertStep) -> torch.Tensor:
    return experts.collect(experts.submit(step.hidden_states, step.topk_ids, step.topk_weights))


@pytest.mark.parametrize(
    ("place", "hot_experts", "is_streamed", "kinds"),
    [
        ("cpu", "off", False, [NativePath]),
        ("gpu", "off", True, [ResidentPath]),
        ("beside", "off", False, [StreamOrderPath, NativePath]),
        ("beside", "off", True, [StreamedPath, StreamOrderPath, NativePath]),
        ("beside", "5", True, [StreamedPath, HotPath, StreamOrderPath, NativePath]),
    ],
)
def test_which_paths_a_layer_has(
    place: str, hot_experts: str, is_streamed: bool, kinds: list[type], make: Make
) -> None:
    """What works for it is known when it is bound; a path without its service is gone."""
    for experts in experts_of(make(place, hot_experts, is_streamed)):
        assert [type(path) for path in experts.paths] == kinds
        assert experts.path_names == ", ".join(kind.NAME for kind in kinds)  # type: ignore[attr-defined]
        assert [experts.path(kind) for kind in kinds] == experts.paths
        assert (experts.kernel is None) is (experts.weights is None) is (kinds == [ResidentPath])


def names(experts: KTransformersExperts, *sizes: int) -> list[str]:
    return [experts.path_of(step_of(experts, rows)).NAME for rows in sizes]


def test_which_path_takes_a_step(make: Make) -> None:
    """Streamed ones from a threshold to the most rows of a step, in the order of the stream up to STREAM_ROWS rows."""
    (slots, *_) = experts_of(make("beside", "5"))
    assert names(slots, 1, THRESHOLD - 1, THRESHOLD, 4096, 4097) == ["hot", "hot", "streamed", "streamed", "native"]
    (streamed, *_) = experts_of(make("beside"))
    assert names(streamed, 1, THRESHOLD - 1, THRESHOLD) == ["stream order", "stream order", "streamed"]
    (plain, *_) = experts_of(make("beside", is_streamed=False))
    assert names(plain, 1, 512, 513) == ["stream order", "stream order", "native"]
    (on_gpu, *_) = experts_of(make("gpu"))
    assert names(on_gpu, 1, 512, 4097) == ["resident"] * 3


def test_who_counts_for_a_router(make: Make) -> None:
    """The path that takes the step: slots have the router divide its choice, streamed steps nothing of it."""
    (slots, *_) = experts_of(make("beside", "5"))
    device = slots._experts.layer_device
    device.begin_step(torch.arange(THRESHOLD))
    hidden = step_of(slots, THRESHOLD).hidden_states
    assert slots.chosen(hidden, TOP_K) is None
    device.begin_step(torch.arange(3))
    memory = slots.chosen(hidden[:3], TOP_K)
    assert memory is not None
    assert memory.split is not None
    assert slots.chosen(hidden[:2], TOP_K) is None  # rows that are not the step's
    (plain, *_) = experts_of(make("beside"))
    plain._experts.layer_device.begin_step(torch.arange(3))
    assert plain.chosen(hidden[:3], TOP_K) is None


def test_a_choice_that_the_router_has_divided_gives_the_same(make: Make) -> None:
    """Bit for bit, as divided in a launch of its own."""
    (experts, *_) = experts_of(make("beside", "5"))
    path = experts.path(HotPath)
    assert path is not None
    assert path.hot is not None
    assert path.usage is not None
    step = step_of(experts, 3)
    experts._experts.layer_device.begin_step(torch.arange(3))
    want = run(experts, step)
    memory = experts.chosen(step.hidden_states, TOP_K)
    assert memory is not None
    assert memory.split is not None
    here, there = path.hot.split(step.topk_ids, experts._experts.number, path.usage, torch.arange(3))
    memory.split.elsewhere.copy_(there)
    got = experts.collect(experts.submit(step.hidden_states, here, step.topk_weights, is_counted=True))
    assert torch.equal(got, want)


def test_rows_that_are_elsewhere_are_no_gpu_s_step(make: Make) -> None:
    (experts, *_) = experts_of(make("beside", "5"))
    for rows in (1, THRESHOLD):
        step = step_of(experts, rows)
        assert experts.path_of(replace(step, hidden_states=step.hidden_states.to("meta"))).NAME == "native"


def test_a_step_gives_the_same_in_order_and_inline(make: Make) -> None:
    (experts, *_) = experts_of(make("beside", is_streamed=False))
    step = step_of(experts, 5)
    assert experts.path_of(step).NAME == "stream order"
    want = run(experts, step)
    experts.paths = [path for path in experts.paths if isinstance(path, NativePath)]
    assert torch.equal(run(experts, step), want)


def test_no_path_is_an_error(make: Make) -> None:
    (experts, *_) = experts_of(make("beside", is_streamed=False))
    experts.paths.pop()
    with pytest.raises(RuntimeError, match=r"experts: none of its paths \(.*\) takes \[513, \d+\]"):
        run(experts, step_of(experts, 513))


@dataclass(eq=False, repr=False)
class ThreeRows(NativePath):
    """Takes steps of three rows, and notes what is asked of it."""

    NAME = "three rows"
    done: list[str] = field(default_factory=list)

    @classmethod
    def is_for(cls, layer: LayerExperts) -> bool:
        return not layer.device.is_gpu

    def requirements(self, source: WeightSource) -> Requirements:
        return Requirements(nbytes={"cpu": 1000}, quant_types=["MADE_UP"])

    def load(self, source: WeightSource) -> None:
        self.done.append("load")

    def bind(self, runtime: OperatorRuntime) -> bool:
        self.done.append("bind")
        return True

    def takes(self, step: ExpertStep) -> bool:
        return step.hidden_states.shape[:-1].numel() == 3

    def submit(self, step: ExpertStep) -> torch.Tensor:
        self.done.append(f"submit {len(step.rows())}")
        return super().submit(step)

    def collect(self, issued: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self.done.append("collect")
        return super().collect(issued, like)

    def warm_up(self, step: ExpertStep) -> None:
        self.done.append("warm up")


@pytest.fixture
def in_front(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routed, "PATHS", (ThreeRows, *routed.PATHS))


def test_one_more_path_in_front(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model asks it first from loading on, and others take what it does not; tokens are as without it."""
    plain = make("beside", is_streamed=False)
    wants = [plain.runner.forward(list(range(3, 3 + rows)), 0, range(rows)).clone() for rows in (3, 4)]
    monkeypatch.setattr(routed, "PATHS", (ThreeRows, *routed.PATHS))
    engine = make("beside", is_streamed=False)
    paths = [experts.path(ThreeRows) for experts in experts_of(engine)]
    for path in paths:
        assert path is not None
        assert path.done[:2] == ["load", "bind"]
        path.done.clear()
    gots = [engine.runner.forward(list(range(3, 3 + rows)), 0, range(rows)).clone() for rows in (3, 4)]
    assert [path.done for path in paths if path is not None] == [["submit 3", "collect"]] * len(paths)
    assert all(torch.equal(got, want) for got, want in zip(gots, wants, strict=True))


@pytest.mark.usefixtures("in_front")
def test_a_path_plans_its_own_bytes(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(model_path, tmp_path, "beside")
    more = plan_model(config, hardware=fake_hardware())
    monkeypatch.undo()
    plain = plan_model(config, hardware=fake_hardware())
    found = [(a, b) for a, b in zip(more.entries, plain.entries, strict=True) if a.operator == "KTransformersExperts"]
    assert [a.nbytes["cpu"] - b.nbytes["cpu"] for a, b in found] == [1000] * len(found)
    assert [a.quant_types for a, _ in found] == [("MADE_UP", *b.quant_types) for _, b in found]


@pytest.mark.usefixtures("in_front")
def test_a_warm_up_launches_for_every_path_that_takes_the_step(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed or counted, and the result is zeros."""
    (experts, *_) = experts_of(make("beside", "5"))
    (made_up, streamed, slots) = (experts.path(kind) for kind in (ThreeRows, StreamedPath, HotPath))
    assert made_up is not None
    made_up.done.clear()
    launched: list[str] = []
    for path in (streamed, slots):
        monkeypatch.setattr(path, "warm_up", lambda step, name=path.NAME: launched.append(name))  # type: ignore[union-attr, misc]
    before = experts.config.expert_stats.totals()
    with warmup():
        results = [run(experts, step_of(experts, rows)) for rows in (3, THRESHOLD)]
    assert not any(result.any() for result in results)
    assert made_up.done == ["warm up"]
    assert launched == ["hot", "streamed", "hot"]
    assert experts.config.expert_stats.totals() == before


def test_layers_with_other_matrices_on_the_gpu_launch_other_kernels(make: Make) -> None:
    """A warm-up tells layers apart by what their paths hold."""
    engine = make("gpu")
    shapes: Any = [SimpleNamespace(shares=None) for _ in engine.plan.layer_devices]
    model = engine.runner.model
    assert layer_kinds(model, engine.plan, shapes) == [0] * len(shapes)
    path = experts_of(engine)[-1].path(ResidentPath)
    assert path is not None
    assert path.experts is not None
    assert path.experts.matrices.down.layout is not GpuLayout.ROWS
    down = replace(path.experts.matrices.down, layout=GpuLayout.ROWS)
    path.experts = replace(path.experts, matrices=replace(path.experts.matrices, down=down))
    assert layer_kinds(model, engine.plan, shapes) == [0] * (len(shapes) - 1) + [1]
