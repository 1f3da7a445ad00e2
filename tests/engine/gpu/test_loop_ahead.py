"""The loop over an engine on GPUs plans a step while the one before it runs: the answers are those of one at a time."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest, PrefillChunk
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.forward import ForwardPass, StepInputs
from ktransformers.engine.step.paged import PagedExecutor
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.errors import EngineError, KTransformersError
from ktransformers.scheduler.records import StepPlan, StepResult
from tests.support.engines.fake_gpus import fake_hardware
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
    request = EngineRequest(ids, params(), name=name)
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


def test_nothing_is_held_behind_a_step_that_is_not_replayed(
    loop: BatchLoop[Engine], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are copied in the order of the stream, and would wait for the step that waits for its tokens."""
    seen, is_eager = list[tuple[bool, bool]](), [False]
    run_step, inputs_of, launch_held = ModelRunner.reduced_step, ForwardPass.inputs_of, ModelRunner.launch_held

    def stepping(self: ModelRunner, *inputs: Any) -> StepLogits:
        is_eager[0] = False
        return run_step(self, *inputs)

    def eager(self: ForwardPass, *inputs: Any) -> StepInputs:
        is_eager[0] = True
        return inputs_of(self, *inputs)

    def launched(self: ModelRunner, *inputs: Any) -> bool:
        seen.append((is_eager[0], launch_held(self, *inputs)))
        return seen[-1][1]

    monkeypatch.setattr(ModelRunner, "reduced_step", stepping)
    monkeypatch.setattr(ForwardPass, "inputs_of", eager)
    monkeypatch.setattr(ModelRunner, "launch_held", launched)
    assert [tokens(begun(loop, ids)) for ids in PROMPTS] == wanted
    assert (False, True) in seen
    assert (True, True) not in seen


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
    request = EngineRequest(PROMPTS[1], params(max_tokens=60))
    events = iter(prefill_and_generate(loop, request))
    assert next(events).token_id == wanted[1][0]
    other = begun(loop, PROMPTS[2])
    events.close()  # type: ignore[attr-defined]
    assert tokens(other) == wanted[2]
    assert loop.stats().num_running == 0


def test_an_answer_ends_at_its_end_token(loop: BatchLoop[Engine], wanted: list[list[int]]) -> None:
    """A step is under way then that ran one token too many: nobody sees it."""
    stop = wanted[0][4]
    request = EngineRequest(PROMPTS[0], params(stop_token_ids=(stop,)))
    found = list(prefill_and_generate(loop, request))
    first = wanted[0].index(stop)
    assert [event.token_id for event in found] == wanted[0][: first + 1]
    assert found[-1].finish_reason is FinishReason.STOP
    assert tokens(begun(loop, PROMPTS[2])) == wanted[2]


def test_a_step_that_fails(loop: BatchLoop[Engine], wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed before it counts, and later answers are as ever."""
    sample, left = PagedExecutor._sample, iter(range(5))

    def failing(self: PagedExecutor, *args: object) -> object:
        if next(left, None) is None:
            monkeypatch.setattr(PagedExecutor, "_sample", sample)
            raise RuntimeError("out of luck")
        return sample(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PagedExecutor, "_sample", failing)
    with pytest.raises(EngineError, match="failed with RuntimeError: out of luck"):
        tokens(begun(loop, PROMPTS[0]))
    assert tokens(begun(loop, PROMPTS[0])) == wanted[0]
