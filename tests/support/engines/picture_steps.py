"""Steps of an executor with pictures, as a test cuts them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import torch

from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine
from ktransformers.scheduler.records import NewSequence, ScheduledSequence, StepPlan
from tests.support.engines.picture_engines import Prompt

_RUNS = itertools.count(1)


def logits_of(
    engine: Engine, prompt: Prompt, answer: Sequence[int], cuts: Sequence[int], *, last: bool = False
) -> torch.Tensor:
    """Logits of all positions, or of the last one of each step: of so many rows of the prompt, the rest of it, and one
    row each of the answer."""
    executor, run_id = engine.executor, next(_RUNS)
    ids = [*prompt.ids, *answer]
    ends = [min(end, len(prompt.ids)) for end in itertools.accumulate(cuts)]
    ends = sorted({*ends, *range(len(prompt.ids), len(ids) + 1)})
    params = SamplingParams(temperature=0.0, seed=0)
    start = NewSequence(
        run_id=run_id, request_id="r", params=params, prompt_len=len(prompt.ids), token_ids=ids, media=prompt.media
    )
    executor._runs[run_id] = executor._started(start)
    found, pages = [], list(range(-(-len(ids) // engine.cache.page_size)))
    for first, end in itertools.pairwise([0, *ends]):
        row = ScheduledSequence(
            run_id=run_id,
            start=first,
            token_ids=ids[first:end],
            token_source=None,
            block_table=pages if not first else [],
            first_page=0 if not first else len(pages),
            is_sampled=True,
            read_slot=(0 if first else -1) if engine.cache.num_states else -1,
            write_slot=0 if engine.cache.num_states else -1,
        )
        plan = StepPlan(step_id=1, starts=[], rows=[row], ended=[])
        made = executor._inputs(plan, executor._new_step()).batch
        kept = torch.arange(end - first)
        batch = dataclasses.replace(made, keep=kept[-1:] if last else kept)
        found.append(executor.runner.step(batch).clone())  # type: ignore[attr-defined]
    executor._end([run_id])
    return torch.cat(found)
