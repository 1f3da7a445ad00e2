"""What a step costs when its weights weigh nothing: engines of small models, with few layers and with more.

A model's layers differ in what they launch and hand over, not only in what they read. So the three arrangements that
published models have are measured as they run: the difference of two models over the difference of their layers is
what a layer costs, the rest is the step's. Widths are 256: a layer's weights stay in the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from transformers import PretrainedConfig

from ktransformers.bench.offline_runs import DecodeCase, OfflineRuns, slots_needed
from ktransformers.config import EngineConfig
from ktransformers.engine.builder import build_paged_engine
from ktransformers.engine.opened import open_synthetic
from ktransformers.models.synthetic_shapes import small_config
from ktransformers.optimize.machine_speed import Curve, StepCost

__all__ = ["FAMILIES", "step_costs"]

FAMILIES = {"grouped": "qwen3-30b-a3b", "latent": "deepseek-v2-lite", "sinks": "gpt-oss-20b"}
"""Kinds of layers, and a published model that has them: attention over groups of heads, over latents, and the former
with sinks and windows, whose layers stay apart on the CPU."""

_LAYERS = (2, 6)
_BATCHES = (1, 16)
_PAGE = 64


def step_costs(
    threads: int, config: EngineConfig | None = None, families: dict[str, str] = FAMILIES
) -> dict[str, StepCost]:
    """By kind of layer. config: where the small models run; on the CPU alone when None."""
    config = config or EngineConfig(use_cuda=False)
    return {kind: _step_cost(name, replace(config, cpu_infer=threads)) for kind, name in families.items()}


def _step_cost(name: str, config: EngineConfig) -> StepCost:
    few, many = (_step_times(small_config(name, layers), config) for layers in _LAYERS)
    layer = [max((b - a) / (_LAYERS[1] - _LAYERS[0]), 0.0) for a, b in zip(few, many, strict=True)]
    step = [max(a - _LAYERS[0] * one, 0.0) for a, one in zip(few, layer, strict=True)]
    at = tuple(map(float, _BATCHES))
    return StepCost(Curve(at, tuple(layer)), Curve(at, tuple(step)))


def _step_times(hf_config: PretrainedConfig, config: EngineConfig) -> list[float]:
    """Seconds of a decode step at each of _BATCHES: the shortest of some passes."""
    case = DecodeCase(steps=8, prompt_len=8)
    config = replace(config, cache_lens=slots_needed([], list(_BATCHES), case, _PAGE))
    opened = open_synthetic(config, hf_config)
    engine = build_paged_engine(opened.config, page_size=_PAGE, max_batch_size=max(_BATCHES), opened=opened)
    try:
        runs = OfflineRuns(engine, 0.0)
        return [_best(partial(_decode_seconds, runs, batch, case)) for batch in _BATCHES]
    finally:
        engine.close()


def _decode_seconds(runs: OfflineRuns, batch: int, case: DecodeCase) -> float:
    return runs.decode(batch, case).ms_per_step / 1e3


def _best(measure: Callable[[], float], times: int = 6) -> float:
    measure()
    return min(measure() for _ in range(times))
