"""The parts that serve an executor's steps beside its runner and its cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ktransformers.engine.media.features import PictureEncoder
from ktransformers.engine.sampling.sampler import TokenMask
from ktransformers.engine.step.drafts import EngineDrafter
from ktransformers.engine.step.hot import StepExperts
from ktransformers.engine.step.kv_offload import TieredCache
from ktransformers.profiling.recorder import Runtime
from ktransformers.scheduler.records import NewSequence

__all__ = ["ExecutorParts"]


@dataclass(frozen=True, slots=True)
class ExecutorParts:
    """The parts of an executor that depend on the model and its configuration; the defaults serve a model without any.

    experts: asked after each step what StepResult says of them. mask_of: called when a run starts, for what decides
    which tokens may come next (structured output); None: every token may. eos_token_ids: see RequestSampler. drafter:
    finds draft tokens that a plan leaves to the engine. pictures: computes pictures; None: requests with some end.
    tiers: what is below the cache. find_damage: returns what to say of the weights where logits or an embedding are no
    numbers. recover: makes the model whole again after a StageLostError, see Ranks.recover. new_runtime: makes what
    records what is below Python, for a profile's recorder.
    """

    experts: StepExperts = field(default_factory=StepExperts)
    mask_of: Callable[[NewSequence], TokenMask | None] = lambda start: None
    eos_token_ids: Sequence[int] = ()
    drafter: EngineDrafter | None = None
    pictures: PictureEncoder | None = None
    tiers: TieredCache | None = None
    find_damage: Callable[[], str] = str
    recover: Callable[[], None] = lambda: None
    new_runtime: Callable[[], Runtime | None] = lambda: None
