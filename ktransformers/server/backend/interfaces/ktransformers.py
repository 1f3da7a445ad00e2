"""The `ktransformers` backend: our engine on a static cache, one request at a time. Does not know HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from ktransformers.core import Progress
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.sequence.profiled import model_meta
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.server.backend.interfaces.transformers import LoadedSession, TransformersInterface

__all__ = ["KTransformersInterface"]


class KTransformersInterface(TransformersInterface):
    """Backend that serves one request at a time with our operators, decode steps as CUDA graphs where the model allows
    it.

    Reuses the longest prefix that a prompt shares with the request before it.
    """

    name: ClassVar[str] = "ktransformers"
    can_suspend: ClassVar[bool] = True
    can_go_on: ClassVar[bool] = True

    @override
    def _load(self, progress: Progress) -> LoadedSession:
        check_tokenizer(self._config)
        engine = build_engine(self._config, progress)
        profiled = model_meta(engine, self.name)
        identified = engine.identified
        loaded = LoadedSession.of(engine, engine.close, profiled, lambda: StepRuntime(engine.runner))
        model = replace(loaded.model, digest=identified.sampled.digest, weights=identified.weights.states)
        return replace(loaded, model=model)
