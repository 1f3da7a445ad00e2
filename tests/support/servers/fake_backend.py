"""A backend without a model, for tests of what is around it."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import ClassVar

from ktransformers.core import FinishReason, GenerationStats, Progress, SamplingParams, TokenEvent
from ktransformers.errors import NotReadyError
from ktransformers.server.backend.base import BackendInterfaceBase, BackendStats, GenerationRequest, ModelInfo
from ktransformers.tokenizer import Tokenizer

MODEL = ModelInfo(Tokenizer(None), 64, 100, (2,), SamplingParams(temperature=0), "FakeForCausalLM", "a fake")


class FakeBackend(BackendInterfaceBase):
    """Answers every prompt with three tokens. `now` is what stats() says. ended: what `end` was asked."""

    name: ClassVar[str] = "fake"

    def __init__(self, is_loaded: bool = True):
        self.is_loaded, self.now = is_loaded, BackendStats(0, 0)
        self.ended: list[str] = []

    async def start(self, progress: Progress | None = None) -> None:
        self.is_loaded = True

    @property
    def is_ready(self) -> bool:
        return self.is_loaded

    @property
    def model(self) -> ModelInfo:
        if not self.is_loaded:
            raise NotReadyError("not loaded")
        return MODEL

    @property
    def max_running(self) -> int:
        return 1

    def stats(self) -> BackendStats:
        return self.now

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        stats = GenerationStats(prompt_len=len(request.prompt_ids), cached_len=1)
        for index in range(3):
            stats.completion_len = index + 1
            yield TokenEvent(5, "", stats, finish_reason=FinishReason.LENGTH if index == 2 else None)

    def end(self, request_id: str) -> None:
        self.ended.append(request_id)

    async def close(self) -> None:
        self.is_loaded = False
