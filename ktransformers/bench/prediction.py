"""What `plan` predicts beside what is then measured, on shapes of published models with random weights.

For each shape: its plan's load, predicted from what the machine was measured to do just before, and the engine of
balance_serve with the same plan. Passes are short and the shortest counts, as it does for the machine: so both are of
a machine that does nothing else for a moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from ktransformers.bench.machine import describe_machine
from ktransformers.bench.offline_runs import DecodeCase, OfflineRuns, slots_needed
from ktransformers.bench.report import Column, Record, Row, Table
from ktransformers.config import EngineConfig
from ktransformers.engine.builder import build_paged_engine
from ktransformers.engine.opened import open_synthetic
from ktransformers.engine.outlook import Outlook, look_ahead
from ktransformers.models.synthetic_shapes import find_shape
from ktransformers.operators.base import ExpertStats
from ktransformers.optimize.machine_speed import MachineSpeed
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
    """shapes: names, each cut to `layers` layers. prefills: prompts' lengths; batches: sequences that decode, each with
    case.prompt_len tokens in the cache. rounds: of each figure, the best of which counts. within: how far a prediction
    may be off; beyond, the record is a failure.
    """

    config: EngineConfig
    shapes: list[str]
    layers: int
    prefills: list[int]
    batches: list[int]
    case: DecodeCase
    rounds: int = 5
    within: float = 0.25


def bench_prediction(work: PredictionWork, measured: Callable[[], MachineSpeed]) -> Record:
    """Print a line per figure: tokens/s predicted and measured. measured: asked for before each shape."""
    table = Table(_COLUMNS)
    for shape in work.shapes:
        speed = measured()
        for row in _rows(shape, work, speed):
            table.add(row)
    worst = max((abs(row["ratio"] - 1.0) for row in table.rows), default=0.0)
    print(f"predictions are within {worst:.0%} of what was measured")
    return {
        "machine": describe_machine(),
        "settings": {"layers": work.layers, "prompt_len": work.case.prompt_len, "within": work.within},
        "rows": table.rows,
        "worst": worst,
        "is_failed": worst > work.within,
    }


def _rows(name: str, work: PredictionWork, speed: MachineSpeed) -> Iterator[Row]:
    slots = slots_needed(work.prefills, work.batches, work.case, PAGE_SIZE)
    shape = find_shape(name)
    opened = open_synthetic(replace(work.config, cache_lens=slots), shape.config(min(work.layers, shape.num_layers)))
    outlook = look_ahead(opened, name=name)
    stats = ExpertStats()
    engine = build_paged_engine(
        opened.config, page_size=PAGE_SIZE, max_batch_size=max(work.batches), expert_stats=stats, opened=opened
    )
    try:
        runs = OfflineRuns(engine, stats, 0.0)
        for prediction in predictions(outlook, speed, work, engine.config.chunk_size):
            rates = [_measured(runs, prediction, work.case) for _ in range(work.rounds)]
            yield {"shape": name, "layers": len(outlook.summary.load.layers)} | _row(prediction, max(rates))
    finally:
        engine.close()


def predictions(outlook: Outlook, speed: MachineSpeed, work: PredictionWork, chunk_size: int) -> list[Prediction]:
    """In the order in which they are measured."""
    load = outlook.summary.load
    context = work.case.prompt_len + work.case.steps // 2
    return [
        *(predict_prefill(load, speed, count, chunk_size) for count in work.prefills),
        *(predict_decode(load, speed, batch, context) for batch in work.batches),
    ]


def _measured(runs: OfflineRuns, prediction: Prediction, case: DecodeCase) -> float:
    if prediction.phase == "prefill":
        return runs.prefill(prediction.tokens).tokens_per_s
    return runs.decode(prediction.tokens, case).tokens_per_s


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
