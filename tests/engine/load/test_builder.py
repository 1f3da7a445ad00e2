"""What both builders leave as it was: what the caller gave them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import fields

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.load import stages
from ktransformers.engine.load.builder import Engine, LoadedModel, build_engine, plan_model
from ktransformers.engine.load.graphs import StepGraphs
from ktransformers.engine.model.opened import open_model
from ktransformers.kernels.cpu import WorkerPool
from tests.support.engines.one_sequence import static_engine
from tests.support.models.demo import DEMO_GGUF as DEMO


def identities(record: object) -> dict[str, int]:
    return {field.name: id(getattr(record, field.name)) for field in fields(record)}  # type: ignore[arg-type]


def paged(config: EngineConfig) -> Engine:
    return build_engine(config, page_size=16, max_batch_size=2)


@pytest.mark.parametrize("build", [build_engine, paged])
def test_the_callers_config_is_left_alone(build: Callable[[EngineConfig], Engine]) -> None:
    config, same = EngineConfig(gguf_path=DEMO), EngineConfig(gguf_path=DEMO)
    before = identities(config)
    with closing(build(config)) as engine:
        assert isinstance(engine, LoadedModel)
        assert engine.config.cpu_infer > 0  # resolved in a copy
        assert engine.config.cache_lens > 0
        assert engine.config.chunk_size > 0
    assert config == same
    assert identities(config) == before


def test_the_callers_model_is_left_alone() -> None:
    config = EngineConfig(gguf_path=DEMO, cache_lens=64)
    opened = open_model(config)
    before = identities(opened)
    plan_model(config, opened)
    with closing(build_engine(config, page_size=16, max_batch_size=2, opened=opened)) as engine:
        assert engine.config.cpu_infer > 0
    assert identities(opened) == before
    assert opened.config.cpu_infer == 0


def test_what_was_started_is_stopped_when_loading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Watched(WorkerPool):
        def close(self) -> None:
            closed.append("pool")
            super().close()

    def fail(*args: object) -> None:
        raise RuntimeError("no graphs")

    monkeypatch.setattr(stages, "WorkerPool", Watched)
    monkeypatch.setattr(StepGraphs, "prepare", fail)
    monkeypatch.setattr("ktransformers.operators.device.Devices.close", lambda self: closed.append("devices"))
    with pytest.raises(RuntimeError, match="no graphs"):
        static_engine(EngineConfig(gguf_path=DEMO, cpu_infer=1, cache_lens=64))
    assert closed == ["devices", "pool"]
