"""The time of a step without its weights: engines of small models, with few layers and with more.

A model's layers differ in what they launch and hand over, not only in what they read. So the three arrangements that
published models have are measured as they run: the difference of two models over the difference of their layers is
what a layer costs, the rest is the step's. Widths are 256: a layer's weights stay in the caches. On a GPU decode steps
and prompts' steps of few rows are replayed; what is launched kernel by kernel costs the program that launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from transformers import PretrainedConfig

from ktransformers.bench.offline.runs import DecodeCase, OfflineRuns, slots_needed
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.model.opened import open_synthetic
from ktransformers.models.synthetic_shapes import small_config
from ktransformers.optimize.machine_speed import Curve, StepCost

__all__ = ["FAMILIES", "GpuStepCosts", "gpu_step_costs", "step_costs"]

FAMILIES = {"grouped": "qwen3-30b-a3b", "latent": "deepseek-v2-lite", "sinks": "gpt-oss-20b"}
"""Kinds of layers, and a published model that has them: attention over groups of heads, over latents, and the former
with sinks and windows, whose layers stay apart on the CPU."""

_LAYERS = (2, 10)
_BATCHES = (1, 16)
_REPLAYED = (32, 512)  # rows of prompts' steps
_LAUNCHED = (2048,)
_PAGE = 64
_ROUNDS = 6
_GPU_ROUNDS = 24  # steps are shorter there, and differ more


@dataclass(frozen=True, slots=True)
class GpuStepCosts:
    """The costs of steps on a GPU by kind of layer: decode steps, replayed steps of prompts, and launched ones."""

    decode: dict[str, StepCost]
    replayed: dict[str, StepCost]
    launched: dict[str, StepCost]


def step_costs(
    threads: int, config: EngineConfig | None = None, families: dict[str, str] = FAMILIES
) -> dict[str, StepCost]:
    """Measure the costs of a decode step by kind of layer.

    config: where the small models run; on the CPU alone when None.
    """
    config = config or EngineConfig(use_cuda=False)
    return {kind: found[0] for kind, found in _measured(threads, config, families, ()).items()}


def gpu_step_costs(
    threads: int, config: EngineConfig, families: dict[str, str] = FAMILIES, launched: Sequence[int] = _LAUNCHED
) -> GpuStepCosts:
    """Measure the costs of steps on a GPU, or on what stands in for one.

    launched: rows of prompts' steps beyond those that are replayed.
    """
    found = _measured(threads, config, families, (_REPLAYED, launched))
    return GpuStepCosts(*({kind: costs[i] for kind, costs in found.items()} for i in range(3)))


def _measured(
    threads: int, config: EngineConfig, families: dict[str, str], prompts: Sequence[Sequence[int]]
) -> dict[str, list[StepCost]]:
    """By kind of layer, the cost of decode steps, then of each group of prompts' steps."""
    config = replace(config, cpu_infer=threads)
    return {kind: _costs(name, config, prompts) for kind, name in families.items()}


def _costs(name: str, config: EngineConfig, prompts: Sequence[Sequence[int]]) -> list[StepCost]:
    rows = [one for group in prompts for one in group]
    few, many = (_step_times(small_config(name, layers), config, rows) for layers in _LAYERS)
    found, first = [], 0
    for group in (_BATCHES, *prompts):
        last = first + len(group)
        found.append(_fitted(group, few[first:last], many[first:last]))
        first = last
    return found


def _fitted(rows: Sequence[int], few: Sequence[float], many: Sequence[float]) -> StepCost:
    layer = [max((b - a) / (_LAYERS[1] - _LAYERS[0]), 0.0) for a, b in zip(few, many, strict=True)]
    step = [max(a - _LAYERS[0] * one, 0.0) for a, one in zip(few, layer, strict=True)]
    at = tuple(map(float, rows))
    return StepCost(Curve(at, tuple(layer)), Curve(at, tuple(step)))


def _step_times(hf_config: PretrainedConfig, config: EngineConfig, prompts: Sequence[int]) -> list[float]:
    """Seconds of a decode step at each of _BATCHES, then of each prompt's only step: the shortest of some passes."""
    case = DecodeCase(steps=8, prompt_len=8)
    config = replace(config, cache_lens=slots_needed(list(prompts), list(_BATCHES), case, _PAGE))
    opened = open_synthetic(config, hf_config)
    engine = build_engine(opened.config, page_size=_PAGE, max_batch_size=max(_BATCHES), opened=opened)
    rounds = _GPU_ROUNDS if config.use_cuda else _ROUNDS
    try:
        runs = OfflineRuns(engine, 0.0)
        decodes = [_best(partial(_decode_seconds, runs, batch, case), rounds) for batch in _BATCHES]
        return decodes + [_best(partial(_prompt_seconds, runs, rows), rounds) for rows in prompts]
    finally:
        engine.close()


def _decode_seconds(runs: OfflineRuns, batch: int, case: DecodeCase) -> float:
    return runs.decode(batch, case).ms_per_step / 1e3


def _prompt_seconds(runs: OfflineRuns, rows: int) -> float:
    return rows / runs.prefill(rows).tokens_per_s


def _best(measure: Callable[[], float], times: int) -> float:
    measure()
    return min(measure() for _ in range(times))
