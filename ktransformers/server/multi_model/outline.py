"""Facts of a model from its headers and its plan, for those who ask before it is loaded."""

from __future__ import annotations

from dataclasses import replace

from ktransformers.config import EngineConfig
from ktransformers.engine.api.pictures import as_served, why_no_pictures
from ktransformers.engine.model.checks import check_tokenizer
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.server.backend.base import ModelInfo
from ktransformers.server.multi_model.needs import ModelNeeds

__all__ = ["outline_of"]


def outline_of(config: EngineConfig, needs: ModelNeeds) -> ModelInfo:
    """Return the facts of a model that is not loaded; loads the tokenizer. Raises KTransformersError as loading the
    model would.
    """
    check_tokenizer(config)
    described = describe_model(open_model(as_served(config)))
    context_len = described.context_len
    return ModelInfo.of(
        described,
        config,
        max_len=needs.cache_lens if context_len is None else min(needs.cache_lens, context_len),
        no_pictures=why_no_pictures(config),
        card=replace(described.card, gpu_bytes=sum(size for name, size in needs.nbytes.items() if name != "cpu")),
    )
