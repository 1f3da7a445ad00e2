"""The `ktransformers` backend: our engine, one request at a time, in the server's own process. Does not know HTTP."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from typing_extensions import override

from ktransformers.core import Progress
from ktransformers.engine.api.llm import open_loop
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.load.builder import build_engine
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.sequence.profiled import model_meta
from ktransformers.server.backend.interfaces.transformers import LoadedLoop, TransformersInterface

__all__ = ["KTransformersInterface"]


class KTransformersInterface(TransformersInterface):
    """Backend that serves one request at a time with our operators, decode steps as CUDA graphs where the model allows
    it.

    Reuses what prompts share with earlier ones, as far as the cache has room for it.
    """

    name: ClassVar[str] = "ktransformers"
    can_suspend: ClassVar[bool] = True
    can_go_on: ClassVar[bool] = True

    @override
    def _load(self, progress: Progress) -> LoadedLoop:
        check_tokenizer(self._config)
        pictures = Pictures(self._config)
        config = pictures.config
        try:
            loop = open_loop(config, lambda report: build_engine(config, report), progress, None, self.name)
        except BaseException:
            pictures.close()
            raise
        loaded = LoadedLoop.of(loop, model_meta(loop.engine, self.name))
        identified = loop.engine.identified
        model = replace(loaded.model, digest=identified.sampled.digest, weights=identified.weights.states)
        pictures.attach(model.tokenizer, has_tower=loop.engine.pictures is not None)
        return replace(loaded, model=model.with_pictures(pictures), pictures=pictures)
