"""EngineLoop on a model without weights: commands, calls, failures and ends, on a thread of its own."""

from __future__ import annotations

import gc
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from ktransformers.core import FinishReason, SamplingParams
from ktransformers.engine.api.engine_loop import EngineLoop
from ktransformers.errors import ConfigError, EngineError, StageLostError
from ktransformers.scheduler.commands import Add, Finish, Resume, Suspend
from ktransformers.scheduler.driver import SchedulerDriver
from ktransformers.scheduler.records import Request, RequestUpdate, StepPlan, StepResult
from ktransformers.tokenizer import Tokenizer
from tests.support.engines.fake_runner import FakeEngine, FakeRunner, ngram_logits
from tests.support.engines.stepping import Stepping

VOCAB, PROMPT, TIMEOUT = 50, [1, 2, 3, 4, 5], 60.0


def fake() -> FakeEngine:
    return FakeEngine(FakeRunner(ngram_logits(VOCAB), VOCAB, 128), Tokenizer(None), page_size=1, chunk_size=4)


def naive(prompt: list[int], count: int) -> list[int]:
    """Greedy decoding, by the model alone."""
    logits, ids = ngram_logits(VOCAB), list(prompt)
    for _ in range(count):
        ids.append(int(logits(ids).argmax()))
    return ids[len(prompt) :]


def added(name: str, prompt: list[int] = PROMPT, *, deadline: float | None = None, count: int = 6) -> Add:
    params = SamplingParams(temperature=0.0, seed=1, max_tokens=count, ignore_eos=True)
    return Add(Request(request_id=name, prompt_ids=prompt, params=params, deadline=deadline))


class Made:
    """A loop, and what it delivers."""

    def __init__(self, build: Callable[..., FakeEngine] = lambda report: fake(), **options: Any):
        self.updates, self.has_ended = queue.SimpleQueue[RequestUpdate](), threading.Event()
        self.plans: list[StepPlan] = []
        self.known: dict[str, list[RequestUpdate]] = {}
        self.failures: list[Exception] = []
        self.loop: EngineLoop[FakeEngine] = EngineLoop(
            build, deliver=self._deliver, planned=self.plans.append, ended=self.has_ended.set, **options
        )

    def _deliver(self, driver: SchedulerDriver) -> None:
        assert threading.current_thread().name == "ktransformers-engine"
        failure = self.loop.failure
        if failure is not None:
            self.failures.append(failure)
        for update in driver.take_updates():
            self.updates.put(update)

    def last(self, name: str) -> RequestUpdate:
        """The update that ends a request."""
        while not any(update.finish_reason is not None for update in self.known.get(name, [])):
            update = self.updates.get(timeout=TIMEOUT)
            self.known.setdefault(update.request_id, []).append(update)
        return self.known[name][-1]

    def answer(self, name: str) -> list[int]:
        self.last(name)
        return [update.token_id for update in self.known[name] if update.token_id is not None]


Make = Callable[..., Made]


@pytest.fixture
def make() -> Iterator[Make]:
    with ExitStack() as stack:

        def made(*args: Any, **options: Any) -> Made:
            made = Made(*args, **options)
            stack.callback(made.loop.close)
            return made

        yield made


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "ktransformers-engine"]


# --- commands and calls ----------------------------------------------------------------------------------------------


def test_what_is_posted_together_is_obeyed_together(make: Make) -> None:
    """Before a step: the first of two is gone before it could have had one."""
    made = make()
    made.loop.post(added("a"), added("b", [7, 8]), Finish("a", FinishReason.ABORT))
    assert made.answer("b") == naive([7, 8], 6)
    assert made.answer("a") == []
    assert [start.request_id for plan in made.plans for start in plan.starts] == ["b"]


def test_commands_are_obeyed_in_their_order(make: Make) -> None:
    made = make()
    for number in range(20):
        made.loop.post(added(str(number), [number, 1]))
    for number in range(20):
        assert made.answer(str(number)) == naive([number, 1], 6)
    order = [start.request_id for plan in made.plans for start in plan.starts]
    assert order == [str(number) for number in range(20)]


def test_a_call_is_between_two_steps_and_raises_to_its_caller(make: Make) -> None:
    made, seen = make(), list[int]()
    made.loop.post(added("a", count=100))
    for _ in range(5):
        seen.append(made.loop.call(lambda: len(made.loop.driver.scheduler.in_flight_ids())))
    assert seen == [0] * 5
    assert made.loop.call(threading.current_thread).name == "ktransformers-engine"
    with pytest.raises(ZeroDivisionError):
        made.loop.call(lambda: 1 // 0)
    made.loop.call_soon(lambda: 1 // 0)  # nobody hears of it, and nothing ends
    assert made.answer("a") == naive(PROMPT, 100)


def test_threads_call_and_post_at_once(make: Make) -> None:
    made, answers = make(), queue.SimpleQueue[int]()

    def ask(number: int) -> None:
        made.loop.post(added(str(number), [number, 2]))
        answers.put(made.loop.call(lambda: number))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers.get() for _ in threads) == list(range(12))
    for number in range(12):
        assert made.answer(str(number)) == naive([number, 2], 6)


# --- handing over ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knows_when", [True, False], ids=["in the step", "behind it"])
def test_what_is_delivered_is_handed_over_in_the_next_step_or_when_none_follows(
    make: Make, knows_when: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While readers are given what a step has made, the next one is computed."""
    said = list[str]()
    made = make(notify=lambda: said.append("hand over"))
    executor = made.loop.engine.executor
    step, deliver = executor.runner.reduced_step, made.loop._deliver

    def computed(*args: Any) -> Any:
        said.append("begin")
        meanwhile, executor.runner.meanwhile = executor.runner.meanwhile, None
        if knows_when:
            meanwhile()
        said.append("compute")
        return step(*args)

    def delivered(driver: SchedulerDriver) -> None:
        said.append("deliver")
        deliver(driver)

    monkeypatch.setattr(executor.runner, "reduced_step", computed)
    made.loop.call(lambda: monkeypatch.setattr(made.loop, "_deliver", delivered))
    del said[:]
    made.loop.post(added("a", count=2))
    assert made.answer("a") == naive(PROMPT, 2)
    made.loop.call(lambda: None)
    in_step = ["hand over"] if knows_when else []
    one = ["begin", *in_step, "compute", "hand over", "deliver"]
    steps = said[said.index("begin") :]
    assert steps[: 3 * len(one)] == 3 * one  # two chunks of the prompt
    assert steps[3 * len(one)] == "hand over"


def test_what_is_delivered_is_handed_over_before_a_call_and_at_the_end(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, handed = list[int](), list[int]()

    def notify() -> None:
        handed.extend(waiting)
        waiting.clear()

    made = make(notify=notify)
    monkeypatch.setattr(made.loop, "_ended", lambda: waiting.extend(handed))
    steps = Stepping(monkeypatch, 3)
    made.loop.post(added("a", count=50))
    while steps.num_taken < 3:
        made.loop.call(lambda: None)
    made.loop.call(lambda: waiting.append(1))
    assert made.loop.call(lambda: list(handed)) == [1]
    made.loop.call_soon(lambda: waiting.append(2))
    made.loop.close()
    assert waiting == [1, 2]


def test_the_experts_of_steps_are_not_kept_for_news_that_nobody_takes(make: Make) -> None:
    engine = fake()
    engine.executor.experts.take_counts = lambda: ((4, 1, 4), b"a count.")  # type: ignore[method-assign]
    made = make(lambda report: engine)
    made.loop.post(added("a"))
    assert made.answer("a") == naive(PROMPT, 6)
    assert made.loop.call(lambda: made.loop.driver.take_news([], None)).expert_counts == b""


# --- steps that fail -------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, made: Made, at: int, error: Exception) -> None:
    """The step of this number raises."""
    executor, numbers = made.loop.engine.executor, iter(range(10_000))
    execute = executor.execute

    def executed(plan: StepPlan) -> StepResult:
        if next(numbers) == at:
            raise error
        return execute(plan)

    monkeypatch.setattr(executor, "execute", executed)


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_step_that_fails(
    make: Make, at: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, error = make(), RuntimeError("out of luck")
    failing(monkeypatch, made, at, error)
    made.loop.post(added("a"), added("b", [7, 8]))
    last = made.last("a")
    assert (last.finish_reason, last.error) == (
        FinishReason.ABORT,
        "the engine failed with RuntimeError: out of luck",
    )
    assert made.failures == [error]
    assert made.answer("b") == naive([7, 8], 6)
    assert made.answer("a") == naive(PROMPT, max(at - 1, 0))  # two chunks, the second of which gives a token
    assert "a step failed" in caplog.text


def test_a_stage_that_is_lost_takes_no_answer_along(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made, recoveries = make(), list[int]()
    failing(monkeypatch, made, 3, StageLostError("stage 1 is gone"))
    monkeypatch.setattr(made.loop.engine.executor, "recover", lambda: recoveries.append(1))
    made.loop.post(added("a"))
    assert made.answer("a") == naive(PROMPT, 6)
    assert recoveries == [1]
    assert "stage 1 is gone; answers go on once another one is there" in caplog.text


# --- deadlines -------------------------------------------------------------------------------------------------------


def test_the_deadline_of_a_suspended_request_wakes_the_loop(make: Make) -> None:
    """Nothing else does: it has no work and nobody posts."""
    made = make()
    due = made.loop.call(lambda: made.loop.driver._clock()) + 0.05
    made.loop.post(added("a", deadline=due), Suspend("a"))
    last = made.last("a")
    assert (last.finish_reason, last.is_expired) == (FinishReason.ABORT, True)
    assert made.plans == []


def test_deadlines_pass_while_others_are_answered(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make()
    now = [1.0]
    monkeypatch.setattr(made.loop.driver, "_clock", lambda: now[0])
    steps = Stepping(monkeypatch, 3)
    made.loop.post(added("a", deadline=50.0), Suspend("a"), added("b", [7, 8]))
    while steps.num_taken < 3:
        made.loop.call(lambda: None)
    now[0] = 50.0
    steps.go_on()
    assert made.answer("b") == naive([7, 8], 6)
    assert made.last("a").is_expired
    made.loop.post(Resume("a"))
    assert made.loop.call(lambda: made.loop.driver.stats()).num_expired == 1


# --- building and closing --------------------------------------------------------------------------------------------


def test_what_building_raises_is_raised_by_the_constructor() -> None:
    before = engine_threads()

    def build(report: Any) -> FakeEngine:
        assert threading.current_thread().name == "ktransformers-engine"
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        Made(build)
    for thread in set(engine_threads()) - set(before):
        thread.join()


def test_an_engine_whose_limits_are_refused_is_closed() -> None:
    engine = FakeEngine(FakeRunner(ngram_logits(VOCAB), VOCAB, 1), Tokenizer(None), page_size=1)
    with pytest.raises(ConfigError, match="no room for a prompt and an answer"):
        Made(lambda report: engine)
    assert engine.is_closed


def test_closing_during_a_load_gives_it_up() -> None:
    """As an interrupt of the constructor does."""
    loops, reports = queue.SimpleQueue[EngineLoop[FakeEngine]](), list[tuple[Any, ...]]()
    loading, closing = threading.Event(), threading.Event()

    class Caught(EngineLoop[FakeEngine]):
        def __init__(self, *args: Any, **options: Any):
            loops.put(self)
            super().__init__(*args, **options)

    def build(report: Callable[..., None]) -> FakeEngine:
        report(1, 2, "a")
        loading.set()
        assert closing.wait(TIMEOUT)
        report(2, 2, "b")
        raise AssertionError("it was not given up")

    def load() -> None:
        with pytest.raises(EngineError, match="loading was given up"):
            Caught(build, deliver=lambda driver: None, progress=lambda *done: reports.append(done))
        refused.set()

    refused = threading.Event()
    thread = threading.Thread(target=load)
    thread.start()
    assert loading.wait(TIMEOUT)
    loop = loops.get()
    closer = threading.Thread(target=loop.close)
    closer.start()
    while not loop.is_closed:
        pass
    closing.set()
    for one in (thread, closer):
        one.join(TIMEOUT)
    assert refused.is_set()
    assert reports == [(1, 2, "a")]


def test_closing_ends_what_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, made = Stepping(monkeypatch, 1), make()
    engine = weakref.ref(made.loop.engine)
    made.loop.post(added("a"))
    while steps.num_taken < 1:
        made.loop.call(lambda: None)
    errors = queue.SimpleQueue[BaseException | None]()
    entered, leave = threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        assert leave.wait(TIMEOUT)

    def call() -> None:
        try:
            made.loop.call(lambda: None)
        except EngineError as error:
            errors.put(error)

    made.loop.call_soon(held)
    assert entered.wait(TIMEOUT)
    closer = threading.Thread(target=made.loop.close)
    closer.start()
    while not made.loop.is_closed:
        pass
    caller = threading.Thread(target=call)
    caller.start()
    assert "this model is closed" in str(errors.get(timeout=TIMEOUT))
    leave.set()
    for thread in (closer, caller):
        thread.join(TIMEOUT)
    assert made.has_ended.is_set()
    made.loop.close()
    for use in (lambda: made.loop.post(Resume("a")), lambda: made.loop.call(lambda: None), made.loop.require_open):
        with pytest.raises(EngineError, match="this model is closed"):
            use()
    gc.collect()
    assert engine() is None, "the engine is dropped though its loop has a name still"


def test_a_call_that_is_queued_behind_the_end_is_answered(make: Make) -> None:
    """It got in before the loop was seen to be closed."""
    made = make()
    entered, leave, errors = threading.Event(), threading.Event(), queue.SimpleQueue[str]()

    def held() -> None:
        entered.set()
        assert leave.wait(TIMEOUT)

    made.loop.call_soon(held)
    assert entered.wait(TIMEOUT)
    made.loop._inbox.put(None)  # the end

    def call() -> None:
        with pytest.raises(EngineError, match="closed") as caught:
            made.loop.call(lambda: None)
        errors.put(str(caught.value))

    caller = threading.Thread(target=call)
    caller.start()
    while made.loop._inbox.qsize() < 2:
        pass
    leave.set()
    assert "closed" in errors.get(timeout=TIMEOUT)
    caller.join(TIMEOUT)


def test_it_closes_on_its_own_thread_too(make: Make) -> None:
    """As a garbage collection may."""
    made = make()
    made.loop.call(made.loop.close)
    assert made.has_ended.wait(TIMEOUT)
    with pytest.raises(EngineError, match="this model is closed"):
        made.loop.post(Resume("a"))


def test_engines_that_are_given_back_are_closed(make: Make) -> None:
    engines = [fake() for _ in range(3)]
    for engine in engines:
        made = make(lambda report, engine=engine: engine)
        made.loop.post(added("a"))
        assert made.answer("a") == naive(PROMPT, 6)
        made.loop.close()
    assert all(engine.is_closed for engine in engines)
