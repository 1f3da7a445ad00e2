"""Engines whose draft tokens come from layers for multi-token prediction, and whether these are the right ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.drafting.drafter import ModelDrafter
from ktransformers.engine.load.builder import Engine, Hardware, build_engine
from ktransformers.engine.step.drafts import DraftRequest
from tests.support.engines.paged_loop import PagedLoop, scheduler_config

__all__ = ["Oracle", "Watched", "check_drafts", "check_engine", "engine_of", "loop_of"]

MARGIN = 1e-3
"""Of logits: where the best two are nearer to each other than that, either may be drafted."""


class Oracle(Protocol):
    """What says which draft tokens are right."""

    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of each of `count` draft tokens behind a sequence."""
        ...


@contextmanager
def engine_of(
    folder: Path, hardware: Hardware | None = None, max_batch_size: int = 8, **changes: object
) -> Iterator[Engine]:
    values: dict[str, object] = {"cpu_infer": 1, "cache_lens": 1024, "self_check": False, "speculative_tokens": 3}
    paths = {"gguf_path" if folder.suffix == ".gguf" else "model_path": folder}
    config = EngineConfig(**(values | paths | {"speculative": "mtp"} | changes))  # type: ignore[arg-type]
    with closing(build_engine(config, hardware=hardware, page_size=16, max_batch_size=max_batch_size)) as engine:
        yield engine


def loop_of(engine: Engine, **changes: object) -> PagedLoop:
    config = engine.scheduler_config
    values: dict[str, object] = {"max_drafts": config.max_drafts, "drafter": config.drafter, "chunk_size": 64}
    values |= {"num_states": engine.cache.num_states, "max_batch_size": 3}
    return PagedLoop(scheduler_config(engine, **(values | changes)), lambda: engine.executor)


class Watched:
    """What a drafter was asked for, and what it drafted: (position of the known token, tokens); by_run: the same with
    the number of the sequence in front."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[tuple[int, list[int]]] = []
        self.by_run: list[tuple[int, int, list[int]]] = []
        draft = ModelDrafter.draft

        def watched(drafter: ModelDrafter, requests: Sequence[DraftRequest]) -> list[list[int]]:
            found = draft(drafter, requests)
            self.seen += [(request.position, tokens) for request, tokens in zip(requests, found, strict=True)]
            for request, tokens in zip(requests, found, strict=True):
                self.by_run.append((request.run_id, request.position, tokens))
            return found

        monkeypatch.setattr(ModelDrafter, "draft", watched)


def check_drafts(tiny: Oracle, token_ids: Sequence[int], position: int, drafts: Sequence[int]) -> int:
    """How many of the drafts are compared: after one that may be another, none is."""
    compared = 0
    for token, logits in zip(drafts, tiny.drafts(list(token_ids[: position + 1]), len(drafts)), strict=True):
        best, next_best = logits.topk(2).values.tolist()
        if best - next_best < MARGIN:
            break
        assert token == int(logits.argmax()), f"draft {compared} behind position {position}"
        compared += 1
    return compared


def check_engine(engine: Engine, tiny: Oracle, monkeypatch: pytest.MonkeyPatch, num_tokens: int = 30) -> None:
    """Of a greedy answer, of one behind a cached prefix, and of one that others are beside."""
    watched, loop, prompt = Watched(engine, monkeypatch), loop_of(engine), list(range(3, 80))
    name = loop.add(prompt, SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True))
    loop.drain()
    known = [*prompt, *loop.answers[name].token_ids]
    assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) > num_tokens
    watched.seen.clear()
    prompt = [*known, 5, 6, 7]
    name = loop.add(prompt, SamplingParams(max_tokens=num_tokens // 3 + 2, temperature=0.0, ignore_eos=True))
    loop.drain()
    last = loop.answers[name].last
    assert last is not None
    assert last.cached_len >= 64
    known = [*prompt, *loop.answers[name].token_ids]
    assert sum(check_drafts(tiny, known, *seen) for seen in watched.seen) > num_tokens // 3
