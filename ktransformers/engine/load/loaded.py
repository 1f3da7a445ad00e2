"""The results of loading a model: an engine for the scheduler's steps, or a part of one."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace

from typing_extensions import override

from ktransformers.cache.paged import PagedCache
from ktransformers.config import CPU_PREFILLS, EngineConfig
from ktransformers.engine.media.features import PictureEncoder
from ktransformers.engine.model.fingerprint import Identified, ModelIdentity
from ktransformers.engine.model.opened import ModelDescription
from ktransformers.engine.parallel.ranks.ranks import Alone, Ranks
from ktransformers.engine.step.executor import PagedExecutor
from ktransformers.engine.step.hot import HotService
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.media.records import Sight
from ktransformers.models.facts import ModelFacts
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.optimize.plan import Plan
from ktransformers.scheduler.config import SchedulerConfig, TierConfig

__all__ = ["Engine", "LoadedModel", "LoadedPart", "scheduler_limits"]

logger = logging.getLogger(__name__)


def scheduler_limits(
    config: EngineConfig, model: ModelDescription, cache: PagedCache, max_batch_size: int
) -> SchedulerConfig:
    """Return the limits of a scheduler for this model and cache, one step at a time, without states or tiers.

    config: resolved. Raises ConfigError.
    """
    return SchedulerConfig(
        num_pages=cache.num_pages,
        page_size=cache.page_size,
        chunk_size=config.chunk_size,
        max_batch_size=max_batch_size,
        vocab_size=model.vocab_size,
        num_extra_ids=model.num_extra_ids,
        eos_token_ids=model.eos_token_ids,
        max_model_len=model.context_len,
        has_prefix_cache=config.prefix_cache,
    )


@dataclass(slots=True)
class LoadedModel(ABC):
    """A loaded model that runs a scheduler's steps. config: as it was resolved, the caller's own is left alone. cache:
    what the scheduler's pages are in."""

    config: EngineConfig
    facts: ModelFacts
    model: ModelDescription
    executor: PagedExecutor
    cache: PagedCache

    @property
    def description(self) -> str:
        """A description of the model in one line."""
        return self.model.description

    @property
    @abstractmethod
    def identity(self) -> ModelIdentity:
        """The identity that files with parts of the cache are checked by. Raises WeightError or UnsupportedError."""

    @property
    @abstractmethod
    def scheduler_config(self) -> SchedulerConfig:
        """The limits of a scheduler for this model, one step at a time. Raises ConfigError."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine's threads and processes. It cannot be used afterwards."""


@dataclass(slots=True)
class Engine(LoadedModel):
    """A model that runs with our operators, one sequence or many. identified: what decides what it computes.
    why_drafts_eager: why steps with draft tokens run without CUDA graphs on GPUs; None: they have some, or nothing is
    on a GPU. drafts_in_block: see SchedulerConfig. expert_files: what experts are read from while the model runs; None:
    all are in memory."""

    plan: Plan
    pool: WorkerPool
    identified: Identified
    max_batch_size: int = 1  # most sequences of a step
    snapshot_interval: int = 0  # tokens between snapshots of states inside of a prompt; 0: none
    tiers: TierConfig | None = None  # below the cache
    hot: HotService = field(default_factory=HotService)
    expert_files: ExpertFiles | None = None
    ranks: Ranks = field(default_factory=Alone)
    why_drafts_eager: str | None = None
    drafts_in_block: bool = False

    @property
    @override
    def identity(self) -> ModelIdentity:
        return self.identified.whole()

    @property
    @override
    def scheduler_config(self) -> SchedulerConfig:
        return replace(
            scheduler_limits(self.config, self.model, self.cache, self.max_batch_size),
            num_states=self.cache.num_states,
            snapshot_interval=self.snapshot_interval,
            tiers=self.tiers,
            max_drafts=self.max_drafts,
            drafter=self.drafter,
            drafts_in_block=self.drafts_in_block,
            picture_sight=self.picture_sight,
            long_chunk_size=self.long_chunk_size,
            long_prompt=self.hot.long_steps.least_tokens,
        )

    @property
    def picture_sight(self) -> Sight:
        """The positions that a position of a picture sees, as SchedulerConfig.picture_sight."""
        return Sight.NOTHING if self.executor.pictures is None else self.executor.pictures.family.sight

    @property
    def long_chunk_size(self) -> int:
        """Tokens of a step of long prompts, see SchedulerConfig: none where its blocks would cut pictures, or rows that
        are routed by what they show."""
        is_routed = self.pictures is not None and self.pictures.family.around is not None
        return 0 if self.picture_sight is not Sight.NOTHING or is_routed else self.hot.long_steps.rows

    @property
    def pictures(self) -> PictureEncoder | None:
        """The encoder of pictures; None where requests have none, or the model has no tower."""
        return self.executor.pictures

    @property
    def uses_gpus(self) -> bool:
        """Whether a part of the model is on a GPU."""
        return any(entry.placement.generate_device != "cpu" for entry in self.plan.entries)

    def __post_init__(self) -> None:
        if self.config.drafter == "auto" and self.why_not_drafted is not None:
            logger.info("no draft tokens: %s; --speculative ngram has them anyway", self.why_not_drafted)

    @property
    def max_drafts(self) -> int:
        """Most draft tokens of a row; 0: none."""
        return self.config.max_drafts(self.why_not_drafted)

    @property
    def drafter(self) -> str:
        """The kind of drafter that finds draft tokens, as SchedulerConfig.drafter."""
        return "ngram" if self.executor.drafter is None else self.config.drafter

    @property
    def why_not_drafted(self) -> str | None:
        """Why --speculative auto drafts nothing: on the CPU, where a row of several tokens might be another one than
        each by itself; on GPUs, where as much is true of any batch, where steps with draft tokens have no CUDA graphs.
        """
        if self.why_drafts_eager is not None:
            return f"their steps would run without CUDA graphs: {self.why_drafts_eager}"
        if self.config.cpu_prefill != CPU_PREFILLS[0]:
            return f"--cpu_prefill {self.config.cpu_prefill} rounds steps of many rows in another way"
        if self.uses_gpus:  # their graphs run as those of decode steps
            return None
        others = [entry.key for entry in self.plan.entries if entry.generate_op != entry.prefill_op]
        if others:
            return f"{others[0]} has another prefill_op than generate_op"
        return None

    @override
    def close(self) -> None:
        """Finish what goes to files, and stop the engine's threads and processes."""
        self.ranks.close()
        if self.executor.tiers is not None:
            self.executor.tiers.close()
        self.plan.devices.close()
        self.pool.close()


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A worker's loaded part of a model, with what it computes the driver's steps with."""

    runner: ModelRunner
    cache: PagedCache
    pool: WorkerPool
