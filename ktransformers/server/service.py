"""Objects that all routes share: the backend, the configuration, and questions that need both."""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from prometheus_client.registry import Collector

from ktransformers import __version__
from ktransformers.errors import ModelNotFoundError, NotReadyError
from ktransformers.media.fetched import FetchedPictures
from ktransformers.optimize.machine_speed import SpeedFile
from ktransformers.server.admission import Admission
from ktransformers.server.backend.base import BackendInterfaceBase, ModelInfo
from ktransformers.server.backend.timeline import Timeline
from ktransformers.server.config import ServerConfig
from ktransformers.server.http.fields import LoggedNames, is_unwanted, note_ignored
from ktransformers.server.http.json_limits import JsonLimits
from ktransformers.server.http.workers import TextWorkers
from ktransformers.server.ongoing import OngoingRequests
from ktransformers.server.telemetry.metrics import Metrics
from ktransformers.server.telemetry.status_window import RecentRequests, SpeedMeter
from ktransformers.server.telemetry.traces import TraceSink

__all__ = ["ModelGroup", "Service", "note_altered", "note_unused", "service_of"]

_MAX_VALUES = 1 << 19  # parsing and checking as many token ids takes some hundredths of a second
_MAX_NODES = 1 << 16  # strings and objects are checked one by one: a tenth of a second

logger = logging.getLogger(__name__)

_ALTERED = "conversations carry %s that no model can be told as it is: it is told what comes nearest (docs/server.md)"

MAX_LOGGED_NAMES = 100
"""Names of models that are not served, said in the log; whoever sends others all the time does not fill it."""


class ModelGroup(ABC):
    """Several models at one address, as the routes of each see the others. services: one of each, in their order."""

    services: Sequence[Service]

    @abstractmethod
    def state_of(self, service: Service) -> str:
        """Return the state of a model in one word: stopped, loading, running or stopping."""

    @abstractmethod
    def expires_at(self, service: Service) -> float | None:
        """Return when a running model is stopped if no request asks for it, in seconds since 1970; None: never."""

    @abstractmethod
    def described(self) -> list[dict[str, Any]]:
        """Return all models with their states and what they take, for people who watch."""

    @abstractmethod
    def metrics(self, more: Collector) -> tuple[bytes, str]:
        """Return the metrics of all models as text, and its content type."""


@dataclass(slots=True)
class Service:
    """The objects that the routes of one app share. traces: where spans go; None: nobody wants them. group: that its
    model is in; None: it is alone.
    """

    backend: BackendInterfaceBase
    config: ServerConfig
    admission: Admission
    metrics: Metrics
    traces: TraceSink | None = None
    group: ModelGroup | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    workers: TextWorkers = field(default_factory=TextWorkers)
    recent: RecentRequests = field(default_factory=RecentRequests)
    ongoing: OngoingRequests = field(init=False)
    speed: SpeedMeter = field(init=False)
    fetched: FetchedPictures = field(init=False)
    _json_limits: JsonLimits | None = None
    _logged: set[str] = field(default_factory=set)  # names of models, each said once
    _ignored_fields: LoggedNames = field(default_factory=LoggedNames)
    _altered_fields: LoggedNames = field(default_factory=lambda: LoggedNames(words=_ALTERED))
    _has_said_most: bool = False

    def __post_init__(self) -> None:
        self.ongoing = OngoingRequests(self.backend, self.config.max_suspended, self.config.kept_streams)
        self.fetched = FetchedPictures(self.config.image_hosts)
        self.speed = SpeedMeter(self.backend, self.metrics.counts, limit_gbps=measured_gbps())

    @property
    def model(self) -> ModelInfo:
        """The loaded model's facts. Raises NotReadyError while the model loads."""
        if not self.backend.is_ready:
            raise NotReadyError("the model is not loaded yet; ask /ready, or try again in a moment")
        return self.backend.model

    @property
    def shown_model(self) -> ModelInfo:
        """Facts of the model, whether it is loaded or not. Raises NotReadyError while that is not known."""
        outline = None if self.backend.is_ready else self.backend.outline
        return self.model if outline is None else outline

    @property
    def beside(self) -> Sequence[Service]:
        """The services of all models at this address, this one included."""
        return (self,) if self.group is None else self.group.services

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the architecture's comes last."""
        names = self.config.model_names
        if self.backend.is_ready and self.backend.model.architecture:
            names += (self.backend.model.architecture,)
        return tuple(dict.fromkeys(names))

    @property
    def listed_names(self) -> tuple[str, ...]:
        """The names that /v1/models lists: those that the operator gave, else one."""
        return self.config.listed_names or self.model_names[:1]

    @property
    def json_limits(self) -> JsonLimits:
        """The limits of a JSON body: nothing larger can hold prompts that this model takes. Known once it is
        loaded.
        """
        if self._json_limits is None:
            if not self.backend.is_ready:
                return JsonLimits(self.config.max_body, _MAX_VALUES, _MAX_NODES)
            model = self.backend.model
            takes_images = model.no_pictures is None or self.config.ignores_images
            self._json_limits = _json_limits(model, self.config.max_body, takes_images=takes_images)
        return self._json_limits

    def check_model(self, asked: str | None) -> str:
        """Return the model's name for the answer: the first served one for a name that is not served.

        Raises ModelNotFoundError for such a name with --strict_model_name.
        """
        names = self.model_names
        if asked is None or asked in names:
            return asked or names[0]
        if self.config.is_strict_on_names:
            raise self.not_served(asked)
        if asked not in self._logged and len(self._logged) < MAX_LOGGED_NAMES:
            self._logged.add(asked)
            logger.warning("%s; answered all the same (--strict_model_name refuses it)", self.not_served(asked))
        return names[0]

    def new_timeline(self) -> Timeline | None:
        """Return a new timeline for one answer; None where no traces are wanted."""
        return None if self.traces is None else Timeline()

    def log_ignored(self, names: Iterable[str]) -> None:
        """Log, once per name, which fields of requests have no effect here."""
        self._ignored_fields.say(names)

    def check_ignored(self, names: Sequence[str]) -> None:
        """Log fields that have no effect on this model, as `log_ignored` does. Raises FieldError with
        --strict_requests.
        """
        if names and self.config.is_strict_on_fields:
            raise is_unwanted(names[0])
        self.log_ignored(names)

    def log_altered(self, names: Iterable[str]) -> None:
        """Log, once per name, which fields of conversations the model is not shown as they were sent."""
        self._altered_fields.say(names)

    @property
    def fingerprint(self) -> str:
        """Identifier of what an answer depends on besides the request: this program's version, the model, and what
        computes it.
        """
        text = f"{__version__}/{self.backend.name}/{self.model.description}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:16]

    def not_served(self, asked: str) -> ModelNotFoundError:
        """Return the error for a name that no model here has."""
        names = ", ".join(dict.fromkeys(name for one in self.beside for name in one.model_names))
        return ModelNotFoundError(f"the model {asked[:200]!r} is not served here, but {names} (see --model_name)")

    def max_tokens(self, asked: int | None, default: int | None = None) -> int | None:
        """Return the most tokens of an answer to a request that asks for `asked`; None: to the end of the context.

        --max_new_tokens, where the operator gave it, bounds them all. default: of the route.
        """
        most = self.config.max_new_tokens
        wanted = asked or default
        if most is None or (wanted is not None and wanted <= most):
            return wanted
        if asked is not None and not self._has_said_most:
            self._has_said_most = True
            logger.info("a request asks for %d tokens; it gets --max_new_tokens %d, as others will", asked, most)
        return most


def _json_limits(model: ModelInfo, max_body: int, *, takes_images: bool) -> JsonLimits:
    """By the context: a token's text takes at most six bytes per character (\\u0041), its number some digits. Pictures
    have any size, in base64.
    """
    max_chars = model.tokenizer.max_token_chars if model.tokenizer.has_vocabulary else 0
    max_values = min(_MAX_NODES + 8 * model.max_len, max(_MAX_VALUES, _MAX_NODES + model.max_len))
    max_bytes = (1 << 20) + max(6 * max_chars * model.max_len, 12 * max_values)
    if takes_images:
        max_bytes = max_body
    return JsonLimits(min(max_body, max_bytes), max_values, _MAX_NODES)


def note_unused(request: Request, names: Sequence[str]) -> None:
    """Note fields of this request that turned out to have no effect, for the log and the response's header.

    Raises FieldError with --strict_requests.
    """
    service_of(request).check_ignored(names)
    note_ignored(request.scope, names)


def note_altered(request: Request, names: Sequence[str]) -> None:
    """Note fields that the model is not shown as they were sent, for the log and the response's header."""
    service_of(request).log_altered(names)
    note_ignored(request.scope, names)


def service_of(request: Request) -> Service:
    """Return the service of the app that got this request."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def measured_gbps() -> float | None:
    """Return the GB/s that this machine's memory gives at most, as doctor measured it; None when it did not. Measures
    nothing.
    """
    speed = SpeedFile().read()
    return None if speed is None else round(speed.cpu.best_read / 1e9, 3)
