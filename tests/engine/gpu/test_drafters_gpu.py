"""Drafters on (made-up) GPUs: they go where the target's last layer is, their steps are replayed, no answer changes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.drafting.drafter import packed
from ktransformers.engine.drafting.draws import draw_drafts
from ktransformers.engine.load.builder import Engine, Hardware, build_engine, plan_model
from ktransformers.engine.sampling.logits_request import BEST_TOKEN, WHOLE_ROW
from ktransformers.engine.step.graph_sizes import DRAFT_ROWS
from ktransformers.errors import EngineError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.layers.gpu import LayerStack
from ktransformers.operators.layers.traced import layer_list
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.streaming import STAGING
from tests.support.engines.drafter_steps import DrafterSteps, draft_in_every_step, runner_of
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.mtp_engines import Oracle, Watched, check_drafts, loop_of
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.gguf.deepseek4_mtp import tiny_deepseek4_mtp, write_deepseek4_mtp
from tests.support.gguf.writer import write_gguf
from tests.support.models.assistant_models import tiny_assistant, write_assistant
from tests.support.models.mtp_families import tiny_family, write_family
from tests.support.models.mtp_models import tiny_mtp, write_mtp
from tests.support.models.tiny_models import VOCAB_SIZE, tiny_model

pytest.importorskip("triton")

BATCH = 2
PARAMS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "seed": 5},
    {"temperature": 0.7, "repetition_penalty": 1.3, "seed": 6},
]


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_in_every_step(monkeypatch)


def config_of(path: Path, **changes: object) -> EngineConfig:
    values: dict[str, object] = {"cpu_infer": 1, "cache_lens": 256, "chunk_size": 64, "self_check": False}
    paths = {"gguf_path" if path.suffix == ".gguf" else "model_path": path}
    return EngineConfig(**(values | paths | {"speculative_tokens": 3} | changes))  # type: ignore[arg-type]


@contextmanager
def engine_of(path: Path, hardware: Hardware, **changes: object) -> Iterator[Engine]:
    config = config_of(path, **changes)
    with closing(build_engine(config, hardware=hardware, page_size=16, max_batch_size=BATCH)) as engine:
        yield engine


def answers_of(engine: Engine, count: int = len(PARAMS), max_tokens: int = 12) -> tuple[list[list[int]], int, int]:
    """Tokens of each answer, draft tokens, and how many were accepted."""
    limits = engine.scheduler_config
    config = scheduler_config(
        engine,
        num_states=engine.cache.num_states,
        max_batch_size=BATCH,
        chunk_size=64,
        max_drafts=limits.max_drafts,
        drafter=limits.drafter,
    )
    loop, rng = PagedLoop(config, lambda: engine.executor), random.Random(1)
    for one in PARAMS[:count]:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(5, 30))]
        loop.add(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **one))  # type: ignore[arg-type]
    loop.drain()
    stats = loop.scheduler.stats()
    return [one.token_ids for one in loop.answers.values()], stats.num_drafted, stats.num_accepted


def places_of(engine: Engine) -> set[str]:
    layout = runner_of(engine)._pass.layout
    return {"cpu"} if layout is None else {device.name for device in layout.devices}


@pytest.mark.parametrize(
    "model_type",
    ["glm4_moe", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("deepseek_v3", "qwen3_next"))],
)
def test_an_mtp_layer_on_a_gpu(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its experts are on the CPU, as there is no form of them for GPUs."""
    folder, graphs = write_mtp(tiny_mtp(model_type), tmp_path), FakeGraphs()
    with engine_of(folder, fake_hardware(), speculative="off") as engine:
        plain = answers_of(engine)[0]
    hardware = fake_hardware(graphs=graphs, draft_rows=DRAFT_ROWS, graph_rows=(64,))
    with caplog.at_level("INFO"), engine_of(folder, hardware, speculative="mtp") as engine:
        assert places_of(engine) == {"cuda:0"}
        (layer,) = layer_list(runner_of(engine).model) or ()
        assert isinstance(layer, LayerStack)
        steps = DrafterSteps(engine, lambda: graphs.replays, monkeypatch)
        answers, num_drafted, _ = answers_of(engine)
    assert answers == plain
    assert num_drafted > 20
    assert all(replayed for rows, replayed, _ in steps.seen if rows <= 8)
    assert steps.num_held > 10
    assert {request for _, _, needs in steps.seen for request in needs} >= {BEST_TOKEN, WHOLE_ROW}
    assert "draft tokens are computed on cuda:0" in caplog.text


def check_replayed(folder: Path, tiny: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft tokens of a short answer, whose steps of one row are replayed, are those of the oracle."""
    graphs = FakeGraphs()
    hardware = fake_hardware(graphs=graphs, draft_rows=(), graph_rows=())
    with engine_of(folder, hardware, speculative="mtp", speculative_tokens=4, cache_lens=64) as engine:
        watched, prompt = Watched(engine, monkeypatch), list(range(3, 12))
        loop = loop_of(engine, max_batch_size=1, chunk_size=16)
        name = loop.add(prompt, SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
        loop.drain()
        known = [*prompt, *loop.answers[name].token_ids]
        assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) > 3
    assert graphs.replays > 3


@pytest.mark.exhaustive
def test_several_mtp_layers_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of them, which take hidden states in front of the last norm, and have heads of their own."""
    tiny = tiny_family("step3p7")
    check_replayed(write_family(tiny, tmp_path), tiny, monkeypatch)


@pytest.mark.exhaustive
def test_an_mtp_layer_of_streams_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes them in memory of their own, from which the next step takes them."""
    tiny = tiny_deepseek4_mtp(kinds=["compressed_sparse_attention"])
    check_replayed(write_deepseek4_mtp(tiny, tmp_path), tiny, monkeypatch)


def test_a_model_that_drafts_for_itself_is_never_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its experts on the GPU."""
    path, graphs = gguf_of(tmp_path), FakeGraphs()
    with engine_of(path, fake_hardware(), speculative="off") as engine:
        plain = answers_of(engine, 2, 6)[0]
    with engine_of(path, fake_hardware(graphs=graphs, draft_rows=(4,)), draft_model=path) as engine:
        steps = DrafterSteps(engine, lambda: graphs.replays, monkeypatch)
        answers, num_drafted, num_accepted = answers_of(engine, 2, 6)
    assert answers == plain
    assert num_drafted == num_accepted > 3
    assert all(replayed for rows, replayed, _ in steps.seen if rows <= 4)


def test_a_draft_that_fails_leaves_no_gpu_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, graphs, left = gguf_of(tmp_path), FakeGraphs(), iter(range(1))

    def failing(*args: object, **how: bool) -> list[int]:
        if next(left, None) is None:
            monkeypatch.setattr("ktransformers.engine.drafting.drafter.draw_drafts", draw_drafts)
            raise EngineError("nothing is drawn")
        return draw_drafts(*args, **how)  # type: ignore[arg-type]

    with engine_of(path, fake_hardware(graphs=graphs, draft_rows=(4,)), draft_model=path) as engine:
        wanted = answers_of(engine, 1, 12)
        engine.executor.reset()
        monkeypatch.setattr("ktransformers.engine.drafting.drafter.draw_drafts", failing)
        num_held = graphs.num_held
        with pytest.raises(EngineError, match="nothing is drawn"):
            answers_of(engine, 1, 12)
        assert graphs.num_held > num_held
        engine.executor.reset()
        assert answers_of(engine, 1, 12) == wanted


def gguf_of(folder: Path) -> Path:
    model = tiny_model("qwen3_moe", seed=1, layers=1)
    return write_gguf(model, folder / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)


def on_gpu(plan: Plan) -> int:
    """Bytes of experts on the GPU, of the target's."""
    found = (entry for entry in plan.entries if entry.operator == "KTransformersExperts")
    return sum(entry.nbytes.get("cuda:0", 0) for entry in found)


def test_it_comes_before_the_experts_that_fill_the_gpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own go there last, where there is room for all of the target's; where there is less all of it is in RAM."""
    caplog.set_level("INFO")
    path = gguf_of(tmp_path)
    config = config_of(path, draft_model=path)

    def planned(nbytes: int) -> Plan:
        return plan_model(config, hardware=fake_hardware(gpu_bytes=nbytes))

    roomy = planned(4 << 30)
    total, experts, whole = roomy.total_bytes["cuda:0"], on_gpu(roomy), roomy.extra_bytes["draft model"]["cuda:0"]
    assert experts > 0
    exact = planned(total)
    assert (exact.total_bytes["cuda:0"], on_gpu(exact)) == (total, experts)
    for nbytes, of_target in ((total - 1, experts), (total - experts, experts), (total - experts - 1, 0)):
        without = planned(nbytes)
        assert (without.extra_bytes["draft model"]["cuda:0"], on_gpu(without)) == (whole - experts, of_target)
        assert without.extra_bytes["draft model"]["cpu"] > exact.extra_bytes["draft model"]["cpu"]
    least = total - experts - whole
    assert set(planned(least + whole - experts - 1).extra_bytes["draft model"]) == {"cpu"}
    assert "has no room for it" in caplog.messages[-1]
    assert "no CUDA device" not in caplog.text
    assert planned(least).total_bytes["cuda:0"] == least
    assert planned(least - 1).total_bytes.get("cuda:0", 0) == 0


def test_its_experts_leave_what_prompts_are_streamed_through(tmp_path: Path) -> None:
    """Where both do not fit, they stay in RAM: a prompt's experts would be computed there, too."""
    model = tiny_model("qwen3_moe", seed=1, layers=4)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q8_0, QuantType.Q8_0)

    def planned(nbytes: int, **changes: object) -> Plan:
        return plan_model(config_of(path, hot_experts="off", **changes), hardware=fake_hardware(gpu_bytes=nbytes))

    roomy = planned(4 << 30)
    whole = planned(4 << 30, draft_model=path).extra_bytes["draft model"]["cuda:0"]
    experts, total = on_gpu(roomy), roomy.total_bytes["cuda:0"]
    found = [planned(total + i * experts // 4, draft_model=path).extra_bytes for i in range(6, 16)]
    both = [extra for extra in found if STAGING in extra and "cuda:0" in extra["draft model"]]
    assert any(extra["draft model"]["cuda:0"] <= whole - experts // 4 for extra in both)


def test_what_is_planned_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With experts of the drafter in RAM, though a GPU has room by the time it is loaded; with the target's there, too,
    it is replayed all the same."""
    path, graphs = gguf_of(tmp_path), FakeGraphs()
    config = config_of(path, draft_model=path)
    roomy = plan_model(config, hardware=fake_hardware())
    nbytes = roomy.total_bytes["cuda:0"] - on_gpu(roomy) - 1
    hardware = fake_hardware(graphs=graphs, gpu_bytes=nbytes)
    with closing(build_engine(config, hardware=hardware, max_batch_size=1)) as engine:
        runner = runner_of(engine)
        (experts,) = (module for module in runner.model.modules() if type(module).__name__ == "KTransformersExperts")
        assert experts.device.name == "cpu"
        assert places_of(engine) == {"cuda:0"}
        assert engine.plan.extra_bytes["draft model"]["cuda:0"] <= nbytes


@pytest.mark.parametrize(
    ("lengths", "most", "steps"),
    [
        ([], 4, []),
        ([0, 2, 1], 4, [[(1, 0, 2), (2, 0, 1)]]),
        ([3, 3, 1], 4, [[(0, 0, 3), (1, 0, 1)], [(1, 1, 3), (2, 0, 1)]]),
        ([9, 1], 4, [[(0, 0, 4)], [(0, 4, 8)], [(0, 8, 9), (1, 0, 1)]]),
        ([4, 4], 4, [[(0, 0, 4)], [(1, 0, 4)]]),
    ],
)
def test_tokens_of_several_sequences_share_steps(
    lengths: list[int], most: int, steps: list[list[tuple[int, int, int]]]
) -> None:
    assert packed(lengths, most) == steps


@pytest.mark.every(2)
@pytest.mark.parametrize("is_ordered", [False, True])
def test_an_assistant_on_a_gpu(is_ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the keys and values that it reads."""
    folder, assistant = write_assistant(tiny_assistant("gemma4-shared", is_ordered=is_ordered), tmp_path)
    graphs = FakeGraphs()
    with engine_of(folder, fake_hardware(), speculative="off") as engine:
        plain = answers_of(engine)[0]
    hardware = fake_hardware(graphs=graphs, draft_rows=DRAFT_ROWS, graph_rows=(64,))
    with engine_of(folder, hardware, draft_model=assistant) as engine:
        assert places_of(engine) == {"cuda:0"}
        steps = DrafterSteps(engine, lambda: graphs.replays, monkeypatch)
        answers, num_drafted, _ = answers_of(engine)
    assert answers == plain
    assert num_drafted > 20
    assert all(replayed for _, replayed, _ in steps.seen)
    assert steps.num_held > 10


def test_an_assistant_goes_nowhere_else(tmp_path: Path) -> None:
    """Than where the keys and values are that it reads: both are on the GPU, or neither."""
    folder, assistant = write_assistant(tiny_assistant("gemma4"), tmp_path)
    config = config_of(folder, draft_model=assistant)

    def planned(nbytes: int) -> Plan:
        return plan_model(config, hardware=fake_hardware(gpu_bytes=nbytes))

    total = planned(4 << 30).total_bytes["cuda:0"]
    assert set(planned(total).extra_bytes["draft model"]) == {"cuda:0"}
    assert planned(total - 1).total_bytes.get("cuda:0", 0) == 0
    assert set(planned(total - 1).extra_bytes["draft model"]) == {"cpu"}


def test_an_assistant_of_layers_on_two_gpus_is_refused(tmp_path: Path) -> None:
    folder, assistant = write_assistant(tiny_assistant("gemma4-shared"), tmp_path)
    config = config_of(folder, draft_model=assistant, spread_layers=True)
    with pytest.raises(UnsupportedError, match=r"of layer 0, on cuda:0, and the last layer is on cuda:1: load"):
        plan_model(config, hardware=fake_hardware(num_gpus=2))
