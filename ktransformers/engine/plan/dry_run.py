"""A model on a machine before it is loaded: the plan, its summary, whether it fits, and what would make it fit.

Reads headers, and a page of some tensors where something was learned of the experts of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.engine.plan.cache_plan import CachePlan
from ktransformers.engine.plan.fit_suggestions import FitSuggestions, find_fit_suggestions
from ktransformers.engine.plan.hardware import Hardware
from ktransformers.engine.plan.planned import Planned
from ktransformers.engine.plan.planning import Planner
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.summary import Summary, summarize
from ktransformers.system.cores import describe_threads

__all__ = ["DryRun", "dry_run", "on_one_thread"]


@dataclass(frozen=True, slots=True)
class DryRun:
    """The results of planning a model without loading it.

    fit_suggestions: None when the model fits. num_threads: of the worker pool that would run it. threads: what decides
    where they run, see describe_threads; None when that is nothing worth saying, or --cpu_infer. long_rows: see
    Planned. expert_paths: the files of experts that are read while the model runs.
    """

    plan: Plan
    summary: Summary
    fit_suggestions: FitSuggestions | None
    num_threads: int
    threads: str | None = None
    long_rows: int = 0
    expert_paths: tuple[Path, ...] = ()


def dry_run(opened: OpenedModel, hardware: Hardware | None = None, name: str | None = None) -> DryRun:
    """Plan a model as `build_engine` would. name: what to call it; by its files when None.

    Raises what `plan_model` raises; a model that does not fit is no error here.
    """
    with on_one_thread():
        return _dry_run(opened, hardware or Hardware.detect(opened.config), name)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Keep torch on one thread in the block: planning tries operators on a few rows, which are computed sooner than
    handed to other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _dry_run(opened: OpenedModel, hardware: Hardware, name: str | None) -> DryRun:
    planned, settled = _plan(opened, hardware)
    summary = summarize(
        planned.plan,
        opened.model,
        facts=opened.facts,
        name=name or _name_of(opened),
        shapes=planned.shapes,
        cache_tokens=planned.num_slots,
        chunk_size=planned.chunk_size,
        disk_bytes=_disk_bytes(opened),
    )
    suggestions = None
    if planned.plan.misfit() is not None:

        def plan_again(config: EngineConfig, hardware: Hardware) -> Planned:
            return _plan(replace(opened, config=config), hardware)[0]

        suggestions = find_fit_suggestions(planned, opened.config, hardware, plan_again)
    asked = opened.config.cpu_infer
    threads = None if asked else describe_threads(settled.num_threads)
    num_threads = asked or settled.num_threads
    paths = () if planned.expert_files is None else tuple(planned.expert_files.paths)
    return DryRun(planned.plan, summary, suggestions, num_threads, threads, planned.long_rows, paths)


def _plan(opened: OpenedModel, hardware: Hardware) -> tuple[Planned, Hardware]:
    return Planner(opened, None, CachePlan.of(opened)).plan(hardware)


def _name_of(opened: OpenedModel) -> str:
    path = opened.config.gguf_path or opened.config.model_path
    return opened.facts.model_type if path is None else path.resolve().name


def _disk_bytes(opened: OpenedModel) -> int | None:
    """Bytes of the files that weights are read from; None without files."""
    return sum(path.stat().st_size for path in set(opened.files)) or None
