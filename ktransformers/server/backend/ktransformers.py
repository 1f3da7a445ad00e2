"""The `ktransformers` backend: our engine on a static cache, one request at a time. Does not know HTTP."""

from __future__ import annotations

from typing import ClassVar

from ktransformers.config import EngineConfig
from ktransformers.engine.builder import build_engine
from ktransformers.engine.llm import default_sampling_params
from ktransformers.engine.session import Session
from ktransformers.server.backend.base import ModelInfo, Progress
from ktransformers.server.backend.checks import check_tokenizer
from ktransformers.server.backend.single import Loaded, SingleBackend

__all__ = ["KTransformersBackend"]


class KTransformersBackend(SingleBackend):
    """Reuses the longest prefix that a prompt shares with the request before it."""

    name: ClassVar[str] = "ktransformers"

    def __init__(self, config: EngineConfig):
        super().__init__()
        self._config = config

    def _load(self, progress: Progress) -> Loaded:
        check_tokenizer(self._config)
        engine = build_engine(self._config, progress)
        session = Session(
            engine.runner,
            chunk_size=engine.config.chunk_size,
            eos_token_ids=engine.eos_token_ids,
            tokenizer=engine.tokenizer,
            has_prefix_cache=engine.config.prefix_cache,
        )
        model = ModelInfo(
            tokenizer=engine.tokenizer,
            max_len=session.max_len,
            vocab_size=engine.runner.vocab_size,
            eos_token_ids=engine.eos_token_ids,
            default_params=default_sampling_params(engine.generation_defaults, None),
            architecture=engine.facts.architecture,
            description=engine.description,
            is_models_limit=session.is_models_limit,
        )
        return Loaded(model, session, engine.close)
