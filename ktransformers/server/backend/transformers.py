"""The `transformers` backend: plain Hugging Face, one request at a time, as the reference to compare with."""

from __future__ import annotations

from typing import ClassVar

from ktransformers.config import EngineConfig
from ktransformers.engine.llm import default_sampling_params
from ktransformers.engine.reference import build_reference_engine
from ktransformers.server.backend.base import ModelInfo, Progress
from ktransformers.server.backend.checks import check_tokenizer
from ktransformers.server.backend.single import Loaded, SingleBackend

__all__ = ["TransformersBackend"]


class TransformersBackend(SingleBackend):
    """The same routes, sampling and limits as the `ktransformers` backend, on transformers' own modules and cache."""

    name: ClassVar[str] = "transformers"

    def __init__(self, config: EngineConfig):
        super().__init__()
        self._config = config

    def _load(self, progress: Progress) -> Loaded:
        check_tokenizer(self._config)
        engine = build_reference_engine(self._config, progress)
        model = ModelInfo(
            tokenizer=engine.tokenizer,
            max_len=engine.config.cache_lens,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            default_params=default_sampling_params(engine.generation_defaults, None),
            architecture=engine.facts.architecture,
            description=engine.description,
            is_models_limit=engine.runner.is_models_limit,
        )
        return Loaded(model, engine.session(), lambda: None)
