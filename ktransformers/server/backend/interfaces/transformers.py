"""The `transformers` backend: plain Hugging Face, one request at a time, as the reference to compare with."""

from __future__ import annotations

from typing import ClassVar

from ktransformers.config import EngineConfig
from ktransformers.core import Progress
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.sequence.profiled import card_meta
from ktransformers.server.backend.interfaces.single import Loaded, SingleBackend
from ktransformers.server.backend.profiler import ProfileConfig

__all__ = ["TransformersBackend"]


class TransformersBackend(SingleBackend):
    """The same routes, sampling and limits as the `ktransformers` backend, on transformers' own modules and cache."""

    name: ClassVar[str] = "transformers"
    no_suspension: ClassVar[str] = (
        "the transformers backend does not suspend requests: what it would compute again depends, in the last bits, on "
        "how many tokens are computed at once; balance_serve and ktransformers do"
    )

    def __init__(self, config: EngineConfig, profile: ProfileConfig | None = None):
        super().__init__(profile)
        self._config = config

    def _load(self, progress: Progress) -> Loaded:
        check_tokenizer(self._config)
        engine = build_reference_engine(self._config, progress)
        return Loaded.of(engine, lambda: None, card_meta(engine.card, engine.config, self.name))
