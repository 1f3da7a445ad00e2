"""What a picture costs a step: pictures that the tower computed, and how long it took, once for each."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from ktransformers.engine.media.features import PictureFeatures
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.scheduler.records import StepPlan, StepResult
from tests.engine.media.test_loops import GREEDY, Paged
from tests.engine.media.test_towers import FIRST, encoder_of
from tests.support.pictures.towers import picture, save_picture, tiny_with_tower

SECONDS = 0.25


def test_a_tower_tells_its_time_once(tmp_path: Path) -> None:
    """A picture that it remembers costs none, and the results are the same."""
    model = tiny_with_tower("gemma3")
    model.save_pretrained(tmp_path)
    save_picture(tmp_path, FIRST, picture("gemma3", model, 2, 3))
    with closing(WorkerPool(1)) as pool:
        encoder = encoder_of(tmp_path, pool)
        first, again = encoder.features(FIRST), encoder.features(FIRST)
    assert first.seconds > 0
    assert again.seconds == 0
    assert again.hidden is first.hidden


def test_steps_and_the_engine_count_it(tmp_path: Path) -> None:
    """Whatever chunks a picture is cut into; text costs nothing."""
    paged = Paged("qwen3_vl", tmp_path)
    shown = paged.pictures.picture("a", 4, 3)
    asked = set[bytes]()
    results = list[StepResult]()

    class Timed:
        family = paged.pictures.family
        positions = staticmethod(paged.pictures.positions)

        @staticmethod
        def features(digest: bytes) -> PictureFeatures:
            found = paged.pictures.features(digest)
            seconds = 0.0 if digest in asked else SECONDS
            asked.add(digest)
            return replace(found, seconds=seconds)

    with closing(paged.engine):
        executor = paged.executor()
        executor.pictures = Timed()  # type: ignore[assignment]
        execute = executor.execute

        def kept(plan: StepPlan) -> StepResult:
            results.append(execute(plan))
            return results[-1]

        executor.execute = kept  # type: ignore[method-assign, assignment]
        loop = paged.loop()
        loop.executor = executor
        prompt = paged.pictures.prompt([5, 9, 17], shown, [23, 24, 25])
        loop.add(prompt.ids, GREEDY, media=prompt.media)
        loop.add(list(range(10, 30)), GREEDY)
        loop.drain()
    told = [result.tower for result in results if result.tower[0]]
    assert len(results) > 3
    assert told == [(1, SECONDS)]
