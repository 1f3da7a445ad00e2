"""A model in transformers and here, for one sequence and for many, each built when a test asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine
from tests.support.engines.one_sequence import StaticEngine, static_engine


@dataclass
class Made:
    """config: of the engines, on the CPU. page_size: of the one with pages."""

    model: PreTrainedModel
    config: EngineConfig
    page_size: int

    @cached_property
    def engine(self) -> StaticEngine:
        return static_engine(self.config)

    @cached_property
    def paged(self) -> Engine:
        return build_engine(self.config, page_size=self.page_size, max_batch_size=8)

    def close(self) -> None:
        for name in ("engine", "paged"):
            if name in self.__dict__:
                getattr(self, name).close()


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """As transformers computes them, in one step."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


def logits_in(engine: StaticEngine, ids: list[int], sizes: Sequence[int]) -> torch.Tensor:
    """Of all tokens, in steps of these sizes."""
    parts, start = [], 0
    for size in sizes:
        chunk = ids[start : start + size]
        parts.append(engine.runner.forward(chunk, start, range(len(chunk))).clone())
        start += len(chunk)
    return torch.cat(parts)
