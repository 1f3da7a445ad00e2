"""The loop over an engine on GPUs plans a step while the one before it runs: the answers are those of one at a time."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest, PrefillChunk
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.step.decode import DecodeSteps
from ktransformers.engine.step.decode_inputs import StaticInputs
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.layout import StepLayout
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import EngineError, KTransformersError
from ktransformers.scheduler.records import Request, StepPlan, StepResult
from tests.support.engines.failing import fail_once
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.gpu_engines import gpu_engine
from tests.support.engines.sequential import Session
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

PROMPTS = [[5, 9, 11, 12, 40, 3], [7, 8], [5, 9, 11, 30, 31, 32, 33, 34, 35]]
Said = TokenEvent | PrefillChunk | KTransformersError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_safetensors(tiny_model("qwen3_moe", seed=1, layers=1), tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def wanted(path: Path) -> list[list[int]]:
    engine = gpu_engine(path)
    session = Session.of(engine)
    try:
        return [[event.token_id or 0 for event in session.generate(ids, params())] for ids in PROMPTS]
    finally:
        engine.close()


def params(**changes: object) -> SamplingParams:
    values = {"temperature": 0.8, "seed": 3, "max_tokens": 12, "ignore_eos": True}
    return SamplingParams(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(params=[1, 4], ids=["one at a time", "together"])
def loop(path: Path, request: pytest.FixtureRequest) -> Iterator[BatchLoop[Engine]]:
    config = EngineConfig(model_path=path, cache_lens=64 * request.param, cpu_infer=1, chunk_size=4)
    made = BatchLoop(
        lambda report: build_engine(
            config, page_size=8, max_batch_size=request.param, hardware=fake_hardware(1), progress=report
        )
    )
    yield made
    made.close()


def begun(loop: BatchLoop[Engine], ids: list[int], name: str | None = None) -> queue.SimpleQueue[Said]:
    events: queue.SimpleQueue[Said] = queue.SimpleQueue()
    request = EngineRequest(Request(prompt_ids=ids, params=params()), name=name)
    prefill_and_generate(loop, request).begin(events.put)
    return events


def tokens(events: queue.SimpleQueue[Said]) -> list[int]:
    found = []
    while True:
        event = events.get(timeout=60)
        if isinstance(event, KTransformersError):
            raise event
        assert isinstance(event, TokenEvent)
        if event.token_id is not None:
            found.append(event.token_id)
        if event.finish_reason is not None:
            return found


def test_steps_are_planned_before_the_one_before_them_is_taken_in(
    loop: BatchLoop[Engine], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_flight, execute = list[int](), PagedExecutor.execute
    held, launch_held = list[bool](), ModelRunner.launch_held

    def launched(self: ModelRunner, *inputs: Any) -> bool:
        held.append(launch_held(self, *inputs))
        return held[-1]

    monkeypatch.setattr(ModelRunner, "launch_held", launched)

    def watched(self: PagedExecutor, plan: StepPlan, *args: object) -> StepResult:
        result = execute(self, plan, *args)  # type: ignore[arg-type]
        in_flight.append(len(loop._loop.driver.scheduler._in_flight))
        return result

    monkeypatch.setattr(PagedExecutor, "execute", watched)
    assert [tokens(events) for events in [begun(loop, ids) for ids in PROMPTS]] == wanted
    assert max(in_flight) == 2
    assert sum(held) >= 8  # launched before their tokens were known
    loop._loop.call(loop._loop.driver.scheduler.check_integrity)
    assert loop.stats().num_running == 0


def test_suspended_and_resumed(loop: BatchLoop[Engine], wanted: list[list[int]]) -> None:
    events, found = begun(loop, PROMPTS[0], "a"), list[int]()
    while len(found) < 12:
        event = events.get(timeout=60)
        assert isinstance(event, TokenEvent)
        found.append(event.token_id or 0)
        if event.finish_reason is None and loop.suspend("a"):
            assert loop.stats().num_suspended == 1
            assert loop.resume("a")
    assert found == wanted[0]


def test_one_that_is_left_disturbs_nobody(loop: BatchLoop[Engine], wanted: list[list[int]]) -> None:
    request = EngineRequest(Request(prompt_ids=PROMPTS[1], params=params(max_tokens=60)))
    events = iter(prefill_and_generate(loop, request))
    assert next(events).token_id == wanted[1][0]
    other = begun(loop, PROMPTS[2])
    events.close()  # type: ignore[attr-defined]
    assert tokens(other) == wanted[2]
    assert loop.stats().num_running == 0


def test_an_answer_ends_at_its_end_token(loop: BatchLoop[Engine], wanted: list[list[int]]) -> None:
    """A step is under way then that ran one token too many: nobody sees it."""
    stop = wanted[0][4]
    request = EngineRequest(Request(prompt_ids=PROMPTS[0], params=params(stop_token_ids=(stop,))))
    found = list(prefill_and_generate(loop, request))
    first = wanted[0].index(stop)
    assert [event.token_id for event in found] == wanted[0][: first + 1]
    assert found[-1].finish_reason is FinishReason.STOP
    assert tokens(begun(loop, PROMPTS[2])) == wanted[2]


def test_a_step_that_fails(loop: BatchLoop[Engine], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed before it counts, and later answers are as ever."""
    fail_once(monkeypatch, PagedExecutor, "_sample")
    with pytest.raises(EngineError, match="failed with RuntimeError: out of luck"):
        tokens(begun(loop, PROMPTS[0]))
    assert tokens(begun(loop, PROMPTS[0])) == wanted[0]


def test_a_step_that_was_released_is_no_other_ones(
    loop: BatchLoop[Engine], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that fails once the step behind it was released: that one comes to nothing."""
    fail_once(monkeypatch, PagedExecutor, "_tier_result")
    with pytest.raises(EngineError, match="failed with RuntimeError: out of luck"):
        tokens(begun(loop, PROMPTS[0]))
    assert tokens(begun(loop, PROMPTS[2])) == wanted[2]


def test_nothing_is_held_behind_a_step_that_is_not_padded(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are copied when the next one is prepared: behind a held step, which waits for them."""
    graphs, num_copied, run, kept = FakeGraphs(), [0], ForwardPass.run, DecodeSteps._kept

    class OnGpu(torch.Tensor):
        def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            assert graphs._held is None, "the host waits for a step that waits for the host"
            num_copied[0] += 1
            return self.as_subclass(torch.Tensor).to(*args, **kwargs)

    monkeypatch.setattr(ForwardPass, "run", lambda *args: run(*args).as_subclass(OnGpu))
    monkeypatch.setattr(DecodeSteps, "_kept", lambda self, logits: kept(self, logits.as_subclass(torch.Tensor)))
    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, chunk_size=4)
    loop = BatchLoop(lambda report: build_engine(config, page_size=8, hardware=fake_hardware(graphs=graphs)))
    try:
        for ids in PROMPTS[0], PROMPTS[2][:7]:  # the second one when decode steps are known
            num_copied[0], num_held = 0, graphs.num_held
            tokens(begun(loop, ids))
            assert num_copied[0] == 2
            assert graphs.num_held > num_held
    finally:
        loop.close()


@pytest.mark.parametrize("failing", ["launch", "complete"])
def test_a_step_that_cannot_be_held_or_released_leaves_no_gpu_waiting(
    failing: str, path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, owner = FakeGraphs(), FakeGraphs if failing == "launch" else StaticInputs
    work = getattr(owner, failing)

    def fails(*args: Any, is_held: bool = failing != "launch", **kwargs: Any) -> None:
        if failing == "launch":
            work(*args, is_held=is_held, **kwargs)
        if is_held:
            monkeypatch.setattr(owner, failing, work)
            raise RuntimeError("out of luck")

    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, chunk_size=4)
    loop = BatchLoop(lambda report: build_engine(config, page_size=8, hardware=fake_hardware(graphs=graphs)))
    try:
        assert tokens(begun(loop, PROMPTS[1])) == wanted[1]
        monkeypatch.setattr(owner, failing, fails)
        with pytest.raises(EngineError, match="out of luck"):
            tokens(begun(loop, PROMPTS[1]))
        assert tokens(begun(loop, PROMPTS[1])) == wanted[1]
    finally:
        loop.close()


def test_errors_of_experts_in_a_step_that_failed_are_no_other_ones(
    path: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The CPU's thread keeps its error until somebody asks."""
    kept, check = list[str](), StepLayout.check_experts

    def checked(self: StepLayout) -> None:
        check(self)
        if kept:
            raise EngineError(kept.pop())

    config = EngineConfig(model_path=path, cache_lens=64, cpu_infer=1, chunk_size=4)
    loop = BatchLoop(lambda report: build_engine(config, page_size=8, hardware=fake_hardware()))
    monkeypatch.setattr(StepLayout, "check_experts", checked)
    fail_once(monkeypatch, PagedExecutor, "_sample", lambda: kept.append("experts out of luck"))
    try:
        with pytest.raises(EngineError, match="RuntimeError: out of luck"):
            tokens(begun(loop, PROMPTS[1]))
        assert "in a step that comes to nothing: experts out of luck" in caplog.text
        assert tokens(begun(loop, PROMPTS[1])) == wanted[1]
    finally:
        loop.close()
