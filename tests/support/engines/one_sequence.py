"""A loaded engine as tests look at one sequence of it: logits of steps that the test chooses, without a scheduler."""

from __future__ import annotations

from typing import Any

from benchmarks.sequence import SequenceRunner
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, build_engine

__all__ = ["StaticEngine", "static_engine"]


class StaticEngine:
    """An engine for one sequence, and the runner of that sequence. All that is not here is the engine's."""

    def __init__(self, engine: Engine):
        self.engine, self.runner = engine, SequenceRunner.of(engine)
        self.tokenizer, self.eos_token_ids, self.card = (
            engine.model.tokenizer,
            engine.model.eos_token_ids,
            engine.model.card,
        )
        self.generation_defaults = engine.model.generation_defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def close(self) -> None:
        self.engine.close()


def static_engine(config: EngineConfig, *args: Any, **kwargs: Any) -> StaticEngine:
    """What `build_engine` builds for one sequence."""
    return StaticEngine(build_engine(config, *args, **kwargs))
