"""The interface that the HTTP layer has to whatever runs the model. Knows neither HTTP nor engines.

    starting ── start() returns ──> ready ── close() ──> closed

A backend never runs a model on the event loop. The events of one request come in order; the last one carries the finish
reason. Whoever stops reading closes the iterator (`aclose`), which ends the generation within one step.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from ktransformers.config import EngineConfig
from ktransformers.core import EmbeddingForm, PastToken, Progress, SamplingParams, TokenEvent
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.model.card import ModelCard
from ktransformers.engine.model.opened import ModelDescription
from ktransformers.engine.sampling.constraints import check_rules
from ktransformers.engine.sequence.outputs import default_sampling_params
from ktransformers.engine.step.hidden import embedding_form
from ktransformers.errors import DeadlineError, KTransformersError, UnsupportedError
from ktransformers.media.reader import ChildReader
from ktransformers.media.records import MediaItem, Sight
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.scheduler.limits import Limits
from ktransformers.server.backend.profiler import Profiler
from ktransformers.server.backend.timeline import Timeline
from ktransformers.tokenizer import Tokenizer
from ktransformers.weights.digests.states import FileState

__all__ = ["BackendInterfaceBase", "BackendStats", "GenerationRequest", "ModelInfo", "deadline_error"]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts that a backend knows of its loaded model. Lengths in tokens.

    max_len: most tokens of one request, prompt and answer together; is_models_limit: no larger cache makes it more.
    default_params: what a request that names no sampling parameters gets, max_tokens excepted. architecture: the class
    name in the model's config.json, if any. embeddings: how they are made.
    max_drafts: draft tokens of an answer in a step at most; 0: none are run. drafter: what finds them:
    ngram, draft or mtp. card: sizes and names for people. digest:
    32 bytes that models of another kind or settings of their arithmetic do not have, nor most other weights; empty
    where nobody asks. weights: their files, for exact_fingerprint. no_pictures: why the model reads text only; None: it
    reads pictures, too, and `pictures` is who reads them once it is loaded. max_picture_len,
    picture_sight, num_extra_ids: see Limits.
    """

    tokenizer: Tokenizer
    max_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_params: SamplingParams
    architecture: str | None
    description: str
    is_models_limit: bool = False
    embeddings: EmbeddingForm = field(default_factory=EmbeddingForm)
    card: ModelCard = field(default_factory=ModelCard)
    digest: bytes = b""
    weights: tuple[FileState, ...] = ()
    max_drafts: int = 0
    drafter: str = "ngram"
    max_picture_len: int = 0
    picture_sight: Sight = Sight.NOTHING
    num_extra_ids: int = 0
    pictures: ChildReader | None = field(default=None, compare=False, repr=False)
    no_pictures: str | None = "its files hold no tower for pictures"

    @classmethod
    def of(cls, described: ModelDescription, config: EngineConfig, **known: Any) -> ModelInfo:
        """Return what the files of a model say of it. known: other fields, and those that differ once it is loaded."""
        fields: dict[str, Any] = {
            "tokenizer": described.tokenizer,
            "vocab_size": described.vocab_size,
            "eos_token_ids": described.eos_token_ids,
            "default_params": default_sampling_params(described.generation_defaults, None),
            "architecture": described.architecture,
            "description": described.description,
            "embeddings": embedding_form(described.card.pooling_type, config.model_path, config.gguf_path),
            "card": described.card,
        }
        return cls(**(fields | known))

    @classmethod
    def loaded(
        cls, described: ModelDescription, config: EngineConfig, scheduler: SchedulerConfig, **known: Any
    ) -> ModelInfo:
        """Return the facts of a loaded model, whose requests go through a scheduler with these limits. known: see
        `of`.
        """
        limits = scheduler.limits
        return cls.of(
            described,
            config,
            max_len=limits.max_len,
            is_models_limit=limits.is_models_limit,
            max_drafts=scheduler.max_drafts,
            drafter=scheduler.drafter,
            max_picture_len=limits.max_picture_len,
            picture_sight=limits.picture_sight,
            num_extra_ids=limits.num_extra_ids,
            **known,
        )

    @property
    def modalities(self) -> list[str]:
        """Names of what a prompt may hold: text, image."""
        return ["text", "image"] if self.no_pictures is None else ["text"]

    def with_pictures(self, support: Pictures) -> ModelInfo:
        """Return the same model, with the pictures that it reads, or why it reads none."""
        return replace(self, pictures=support.reader, no_pictures=support.why_not)

    @property
    def limits(self) -> Limits:
        """Limits of what a request to this model may ask."""
        return Limits(
            max_len=self.max_len,
            vocab_size=self.vocab_size,
            has_vocabulary=self.tokenizer.has_vocabulary,
            has_head=self.card.has_head,
            is_models_limit=self.is_models_limit,
            max_picture_len=self.max_picture_len,
            picture_sight=self.picture_sight,
            num_extra_ids=self.num_extra_ids,
            set_by="the server's --cache_lens",
            remedy="start the server with a larger --cache_lens",
        )


def _never() -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A request for the generation of one answer, filled by the routes. A request for n choices is n of these.

    request_id: never used twice, for a backend may still end one when its reader has left. params.seed is always set.
    priority: a smaller number is served earlier. timeout: seconds from now on, None: no limit. cache_salt: requests
    share cached prefixes only with requests of the same salt. timeline: where the backend notes times; None: nobody
    wants them. past: the answer so far, of one that another process has begun: its events come first, as they came
    there. Only with can_go_on. is_suspended: asked when it begins. Of one that is nothing is computed until `resume`,
    its prompt neither. Only with can_suspend. prediction_ids: tokens that the client expects of the answer, where draft
    tokens are looked for, too: no answer depends on them. media: the pictures of the prompt, see
    scheduler.records.Request.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    timeout: float | None = None
    cache_salt: str = ""
    timeline: Timeline | None = None
    past: Sequence[PastToken] = ()
    is_suspended: Callable[[], bool] = _never
    prediction_ids: tuple[int, ...] = ()
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class BackendStats:
    """Figures of a backend at this moment. cache_usage: a fraction of cache_len, the tokens that the cache holds (0:
    not known).
    """

    num_running: int
    num_waiting: int
    cache_usage: float = 0.0
    cache_len: int = 0
    num_suspended: int = field(default=0, kw_only=True)


class BackendInterfaceBase(ABC):
    """Interface that the HTTP layer calls to generate; one subclass for each backend. All methods are called on one
    event loop.

    has_priorities: whether GenerationRequest.priority changes the order of service.
    can_suspend: whether `suspend` works; else no_suspension says why not. can_go_on: see GenerationRequest.past.
    """

    name: ClassVar[str]
    has_priorities: ClassVar[bool] = False
    can_suspend: ClassVar[bool] = False
    can_go_on: ClassVar[bool] = False
    no_suspension: ClassVar[str] = "this backend does not suspend requests"

    @abstractmethod
    async def start(self, progress: Progress | None = None) -> None:
        """Load the model. Raises the KTransformersError that the user has to see."""

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the model is loaded, so that requests are answered or queued."""

    @property
    def pause(self) -> str | None:
        """Reason why nothing is computed at the moment although the model is loaded: requests are queued. By default
        never.
        """
        return None

    @property
    @abstractmethod
    def model(self) -> ModelInfo:
        """The loaded model's facts. Raises NotReadyError before `start` has returned."""

    @property
    def outline(self) -> ModelInfo | None:
        """Facts of the model while it is not loaded; None: none are known, which is the default."""
        return None

    @property
    @abstractmethod
    def max_running(self) -> int:
        """Number of requests that are computed at once; more of them wait."""

    @property
    def profiler(self) -> Profiler:
        """The backend's profiler. Raises UnsupportedError where steps cannot be recorded, which is the default."""
        raise UnsupportedError(f"the {self.name} backend writes no profiles")

    @abstractmethod
    def stats(self) -> BackendStats:
        """Return the figures of this moment."""

    def check(self, request: GenerationRequest) -> None:
        """Raise errors of a request that can be found before a response begins, without generating anything.

        See Limits and Grammars.
        """
        model = self.model
        model.limits.check(request.prompt_ids, request.params, request.prediction_ids, request.media)
        check_rules(model.tokenizer.grammars(model.vocab_size, model.eos_token_ids), request.params)

    @abstractmethod
    def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate an answer. Yields an event for each token; the last one carries the finish reason.

        Raises NotReadyError, DeadlineError, EngineError or SlowReaderError (the events are not read, and too many wait)
        at the point of the stream where it happens.
        """

    def suspend(self, request_id: str) -> None:
        """Suspend an open generation, at whatever step it is, until `resume`. Its time goes on.

        It then needs nothing of the engine; the tokens afterwards are those that would have come. Tokens that were on
        their way still come. Does nothing for one that is suspended, has ended, or never came. Only with can_suspend.
        """
        raise UnsupportedError(self.no_suspension)

    def resume(self, request_id: str) -> None:
        """Resume a suspended generation, in the order that it had. Does nothing for others."""
        raise UnsupportedError(self.no_suspension)

    @abstractmethod
    def end(self, request_id: str) -> None:
        """End an open generation, suspended or not: its reader gets a last event with ABORT.

        Does nothing for one that has ended or never came.
        """

    async def lost(self) -> KTransformersError:
        """Wait until the backend cannot go on although nobody closed it, and return the reason. By default never."""
        never: asyncio.Future[KTransformersError] = asyncio.get_running_loop().create_future()
        return await never

    @abstractmethod
    async def close(self) -> None:
        """End everything that runs and free the model. Safe to call twice."""


def deadline_error(request: GenerationRequest, *, is_suspended: bool = False) -> DeadlineError:
    """Return the error for an answer whose time is over."""
    what = "was suspended when the" if is_suspended else "was not complete within the"
    end = " were over: resume it sooner, or give it more time (timeout)" if is_suspended else ""
    return DeadlineError(f"the answer {what} {request.timeout} s that it was given{end}")
