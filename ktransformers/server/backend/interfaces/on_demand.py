"""A backend that can be started and closed many times: each start makes the real one anew. Does not decide when.

stopped ── start() ──> ready ── close() ──> stopped
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from typing_extensions import override

from ktransformers.core import Progress, TokenEvent
from ktransformers.errors import KTransformersError, NotReadyError
from ktransformers.server.backend.base import BackendInterfaceBase, BackendStats, GenerationRequest, ModelInfo
from ktransformers.server.backend.profiler import Profiler

__all__ = ["OnDemandInterface"]


class OnDemandInterface(BackendInterfaceBase):
    """A backend that can be started again after it was closed.

    make: makes the real backend, not started. outline: what is known of the model before it was ever loaded.

    A subclass that `of` returns has the name and the abilities of the real one.
    """

    def __init__(self, make: Callable[[], BackendInterfaceBase], outline: ModelInfo):
        self._make, self._outline = make, outline
        self._inner: BackendInterfaceBase | None = None

    @staticmethod
    def of(kind: type[BackendInterfaceBase]) -> type[OnDemandInterface]:
        """Return the subclass for real backends of this class."""
        traits = ("name", "has_priorities", "can_suspend", "can_go_on", "no_suspension")
        named = {name: getattr(kind, name) for name in traits}
        return type(f"OnDemand{kind.__name__}", (OnDemandInterface,), named)

    @override
    async def start(self, progress: Progress | None = None) -> None:
        assert self._inner is None, "it runs already"
        self._inner = self._make()
        try:
            await self._inner.start(progress)
        except BaseException:
            await self.close()
            raise
        self._outline = self._inner.model

    @override
    async def close(self) -> None:
        inner, self._inner = self._inner, None
        if inner is not None:
            await inner.close()

    def _running(self) -> BackendInterfaceBase:
        if self._inner is None:
            raise NotReadyError("the model was stopped; send the request again")
        return self._inner

    @property
    def is_ready(self) -> bool:
        return self._inner is not None and self._inner.is_ready

    @override
    @property
    def pause(self) -> str | None:
        return None if self._inner is None else self._inner.pause

    @property
    def model(self) -> ModelInfo:
        """The model's facts, also of a backend that has stopped: what is left of its answers is still written."""
        return self._outline if self._inner is None else self._inner.model

    @override
    @property
    def outline(self) -> ModelInfo:
        return self._outline

    @property
    def max_running(self) -> int:
        return 1 if self._inner is None else self._inner.max_running

    @override
    @property
    def profiler(self) -> Profiler:
        return self._running().profiler

    @override
    def stats(self) -> BackendStats:
        return BackendStats(0, 0) if self._inner is None else self._inner.stats()

    @override
    def check(self, request: GenerationRequest) -> None:
        self._running().check(request)

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        """Generate an answer with the real backend, as BackendInterfaceBase.inference does."""
        async with aclosing(self._running().inference(request)) as events:
            async for event in events:
                yield event

    @override
    def suspend(self, request_id: str) -> None:
        if self._inner is not None:
            self._inner.suspend(request_id)

    @override
    def resume(self, request_id: str) -> None:
        if self._inner is not None:
            self._inner.resume(request_id)

    @override
    def end(self, request_id: str) -> None:
        if self._inner is not None:
            self._inner.end(request_id)

    @override
    async def lost(self) -> KTransformersError:
        return await self._running().lost()
