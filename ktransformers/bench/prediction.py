"""The predictions of `plan` beside what is then measured, on shapes of published models with random weights.

For each shape: its plan's load, predicted from what the machine was measured to do in the same minutes, and the engine
of balance_serve with the same plan. Passes are short and the shortest counts, as it does for the machine: so both are
of a machine that does nothing else for a moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

from ktransformers.bench.common.machine import describe_machine
from ktransformers.bench.common.report import Column, FigureTable, Record
from ktransformers.bench.offline.runs import DecodeCase, OfflineRuns, slots_needed
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.engine.plan.dry_run import DryRun, dry_run
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.optimize.machine_speed import MachineSpeed, best_of
from ktransformers.optimize.predict import Prediction, predict_decode, predict_prefill

__all__ = ["PredictionWork", "bench_prediction"]

logger = logging.getLogger(__name__)

PAGE_SIZE = 64
_COLUMNS = (
    Column("shape", 17),
    Column("layers", 6),
    Column("phase", 7),
    Column("tokens", 6),
    Column("predicted", 10, ".1f"),
    Column("measured", 10, ".1f"),
    Column("ratio", 6, ".2f"),
    Column("limit", 24),
)


@dataclass(frozen=True, slots=True)
class PredictionWork:
    """The predictions to check, for `shapes`: names, each cut to `layers` layers.

    prefills: prompts' lengths; batches: sequences that decode, each with case.prompt_len tokens in the cache. rounds:
    of each figure, the best of which counts. within: how far a prediction may be off; beyond, the record is a failure.
    visits: machine and shapes are measured so often, in turns, and the best of each counts.
    """

    config: EngineConfig
    shapes: list[str]
    layers: int
    prefills: list[int]
    batches: list[int]
    case: DecodeCase
    rounds: int = 5
    within: float = 0.25
    visits: int = 2

    @property
    def figures(self) -> list[tuple[str, int]]:
        """The phase and the tokens of each figure."""
        return [*(("prefill", count) for count in self.prefills), *(("decode", batch) for batch in self.batches)]


def bench_prediction(work: PredictionWork, measured: Callable[[], MachineSpeed]) -> Record:
    """Print a line per figure: tokens/s predicted and measured. measured: the machine, asked for in each visit."""
    speed: MachineSpeed | None = None
    outlooks: dict[str, tuple[DryRun, int]] = {}
    rates: dict[tuple[str, str, int], float] = {}
    for _ in range(work.visits):
        found = measured()
        speed = found if speed is None else best_of(speed, found)
        for shape in work.shapes:
            with closing(_Run(shape, work)) as run:
                outlooks[shape] = run.preview, run.chunk_size
                for phase, tokens in work.figures:
                    key = (shape, phase, tokens)
                    rates[key] = max(rates.get(key, 0.0), run.tokens_per_s(phase, tokens))
    assert speed is not None
    table = FigureTable(_COLUMNS)
    for shape, (preview, chunk_size) in outlooks.items():
        for one in predictions(preview, speed, work, chunk_size):
            head = {"shape": shape, "layers": len(preview.summary.load.layers)}
            table.add(head | _row(one, rates[shape, one.phase, one.tokens]))
    worst = max((abs(row["ratio"] - 1.0) for row in table.rows), default=0.0)
    print(f"predictions are within {worst:.0%} of what was measured")
    return {
        "machine": describe_machine(),
        "speed": asdict(speed),
        "settings": {"layers": work.layers, "prompt_len": work.case.prompt_len, "within": work.within},
        "rows": table.rows,
        "worst": worst,
        "is_failed": worst > work.within,
    }


class _Run:
    """An engine of a shape, and its plan."""

    def __init__(self, name: str, work: PredictionWork) -> None:
        slots = slots_needed(work.prefills, work.batches, work.case, PAGE_SIZE)
        shape, config = find_shape(name), replace(work.config, cache_lens=slots)
        opened = open_synthetic(config, shape.config(min(work.layers, shape.num_layers)))
        self.preview = dry_run(opened, name=name)
        self._engine = build_engine(opened.config, page_size=PAGE_SIZE, max_batch_size=max(work.batches), opened=opened)
        self.chunk_size = self._engine.config.chunk_size
        self._runs, self._work = OfflineRuns(self._engine, 0.0), work

    def close(self) -> None:
        self._engine.close()

    def tokens_per_s(self, phase: str, tokens: int) -> float:
        """The best of the rounds."""
        runs, case = self._runs, self._work.case

        def once() -> float:
            return (runs.prefill(tokens) if phase == "prefill" else runs.decode(tokens, case)).tokens_per_s

        return max(once() for _ in range(self._work.rounds))


def predictions(preview: DryRun, speed: MachineSpeed, work: PredictionWork, chunk_size: int) -> list[Prediction]:
    """Return the predictions in the order in which they are measured."""
    load = preview.summary.load
    context = work.case.prompt_len + work.case.steps // 2
    return [
        *(predict_prefill(load, speed, count, chunk_size, preview.long_rows) for count in work.prefills),
        *(predict_decode(load, speed, batch, context) for batch in work.batches),
    ]


def _row(prediction: Prediction, measured: float) -> dict[str, Any]:
    shown = asdict(prediction)
    (limit, share), *_ = prediction.ranked()
    return {
        "phase": prediction.phase,
        "tokens": prediction.tokens,
        "context": prediction.context,
        "predicted": prediction.tokens_per_s,
        "measured": measured,
        "ratio": prediction.tokens_per_s / measured,
        "limit": limit,
        "limit_share": share,
        "parts_ms": {name: 1e3 * seconds for name, seconds in shown["parts"].items()},
        "assumed": shown["assumed"],
    }
