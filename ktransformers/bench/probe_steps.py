"""What a step costs when its weights weigh nothing: engines of small models, with few layers and with more.

A model's layers differ in what they launch and hand over, not only in what they read. So the three arrangements that
published models have are measured as they run: the difference of two models over the difference of their layers is
what a layer costs, the rest is the step's. Widths are 256: a layer's weights stay in the caches. On a GPU decode steps
are replayed and prompts' steps are launched one by one, which is another cost: that of the program that launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from transformers import PretrainedConfig

from ktransformers.bench.offline_runs import DecodeCase, OfflineRuns, slots_needed
from ktransformers.config import EngineConfig
from ktransformers.engine.builder import build_paged_engine
from ktransformers.engine.opened import open_synthetic
from ktransformers.models.synthetic_shapes import small_config
from ktransformers.optimize.machine_speed import Curve, StepCost

__all__ = ["FAMILIES", "launch_costs", "step_costs"]

FAMILIES = {"grouped": "qwen3-30b-a3b", "latent": "deepseek-v2-lite", "sinks": "gpt-oss-20b"}
"""Kinds of layers, and a published model that has them: attention over groups of heads, over latents, and the former
with sinks and windows, whose layers stay apart on the CPU."""

_LAYERS = (2, 10)
_BATCHES = (1, 16)
_PROMPTS = (32, 512)
_PAGE = 64
_ROUNDS = 6
_GPU_ROUNDS = 24  # steps are shorter there, and differ more


def step_costs(
    threads: int, config: EngineConfig | None = None, families: dict[str, str] = FAMILIES
) -> dict[str, StepCost]:
    """By kind of layer. config: where the small models run; on the CPU alone when None."""
    return {kind: cost for kind, (cost, _) in _measured(threads, config, families, ()).items()}


def launch_costs(threads: int, config: EngineConfig) -> tuple[dict[str, StepCost], dict[str, StepCost]]:
    """(step_costs, the same of prompts' steps) on a GPU."""
    found = _measured(threads, config, FAMILIES, _PROMPTS)
    return {kind: decode for kind, (decode, _) in found.items()}, {kind: one for kind, (_, one) in found.items() if one}


def _measured(
    threads: int, config: EngineConfig | None, families: dict[str, str], prompts: Sequence[int]
) -> dict[str, tuple[StepCost, StepCost | None]]:
    config = replace(config or EngineConfig(use_cuda=False), cpu_infer=threads)
    return {kind: _costs(name, config, prompts) for kind, name in families.items()}


def _costs(name: str, config: EngineConfig, prompts: Sequence[int]) -> tuple[StepCost, StepCost | None]:
    few, many = (_step_times(small_config(name, layers), config, prompts) for layers in _LAYERS)
    decode = _told_apart(_BATCHES, few[: len(_BATCHES)], many[: len(_BATCHES)])
    if not prompts:
        return decode, None
    return decode, _told_apart(prompts, few[len(_BATCHES) :], many[len(_BATCHES) :])


def _told_apart(rows: Sequence[int], few: Sequence[float], many: Sequence[float]) -> StepCost:
    layer = [max((b - a) / (_LAYERS[1] - _LAYERS[0]), 0.0) for a, b in zip(few, many, strict=True)]
    step = [max(a - _LAYERS[0] * one, 0.0) for a, one in zip(few, layer, strict=True)]
    at = tuple(map(float, rows))
    return StepCost(Curve(at, tuple(layer)), Curve(at, tuple(step)))


def _step_times(hf_config: PretrainedConfig, config: EngineConfig, prompts: Sequence[int]) -> list[float]:
    """Seconds of a decode step at each of _BATCHES, then of each prompt's only step: the shortest of some passes."""
    case = DecodeCase(steps=8, prompt_len=8)
    config = replace(config, cache_lens=slots_needed(list(prompts), list(_BATCHES), case, _PAGE))
    opened = open_synthetic(config, hf_config)
    engine = build_paged_engine(opened.config, page_size=_PAGE, max_batch_size=max(_BATCHES), opened=opened)
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
