"""The results of loading a model: an engine for one sequence, or for the scheduler's steps, or a part of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.engine.model.card import ModelCard
from ktransformers.engine.model.fingerprint import Identified, ModelIdentity
from ktransformers.engine.model.opened import ModelDescription
from ktransformers.engine.parallel.ranks.ranks import Alone, Ranks
from ktransformers.engine.step.hot import HotService
from ktransformers.engine.step.paged import PagedExecutor
from ktransformers.engine.step.runner import ModelRunner, StaticRunner
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.plan import Plan
from ktransformers.scheduler.config import TierConfig
from ktransformers.tokenizer import Tokenizer

__all__ = ["Engine", "LoadedModel", "LoadedPart", "PagedEngine"]


@dataclass(slots=True)
class LoadedModel:
    """A loaded model with what is known of it. config: as it was resolved, the caller's own is left alone.

    identified: what decides what it computes.
    """

    config: EngineConfig
    plan: Plan
    model: ModelDescription
    pool: WorkerPool
    identified: Identified

    @property
    def identity(self) -> ModelIdentity:
        """The model's identity by all bytes of its weights, see Identified.whole. Raises WeightError."""
        return self.identified.whole()

    @property
    def description(self) -> str:
        """A description of the model in one line."""
        return self.model.description

    def close(self) -> None:
        """Stop the engine's worker threads. The engine cannot be used afterwards."""
        self.plan.devices.close()
        self.pool.close()


@dataclass(slots=True)
class Engine(LoadedModel):
    """A model for one sequence at a time, with what is needed to feed it."""

    facts: ModelFacts
    runner: StaticRunner
    hot: HotService = field(default_factory=HotService)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, without vocabulary when the model's files carry none."""
        return self.model.tokenizer

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens that end an answer."""
        return self.model.eos_token_ids

    @property
    def generation_defaults(self) -> Mapping[str, Any]:
        """The generation settings that the model's authors recommend, see ModelDescription."""
        return self.model.generation_defaults

    @property
    def card(self) -> ModelCard:
        """The model's figures, as interfaces show them."""
        return self.model.card


@dataclass(slots=True)
class PagedEngine(LoadedModel):
    """A model that runs the scheduler's steps."""

    executor: PagedExecutor
    cache: PagedCache
    snapshot_interval: int = 0  # tokens between snapshots of states inside of a prompt; 0: none
    tiers: TierConfig | None = None  # below the cache
    hot: HotService = field(default_factory=HotService)
    ranks: Ranks = field(default_factory=Alone)

    def close(self) -> None:
        """Finish what goes to files, and stop the worker threads. The engine cannot be used afterwards."""
        self.ranks.close()
        if self.executor.tiers is not None:
            self.executor.tiers.close()
        LoadedModel.close(self)


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A worker's loaded part of a model, with what it computes the driver's steps with."""

    runner: ModelRunner
    cache: PagedCache
    pool: WorkerPool
