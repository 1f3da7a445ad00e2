"""What is known of a model before it is loaded counts its tower, and says nothing else of it than loading does."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.cli.models.plan import open_planned
from ktransformers.config import EngineConfig
from ktransformers.server.multi_model.needs import ToPlan, plan_needs
from ktransformers.server.multi_model.outline import outline_of
from tests.engine.api.test_chat_with_pictures import folder_of


def test_the_tower_is_planned_where_pictures_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, _ = folder_of("qwen3_vl", tmp_path)
    config = EngineConfig(model_path=folder, cache_lens=512, cpu_infer=1)
    with caplog.at_level(logging.INFO):
        needs = plan_needs(ToPlan(config))
        assert outline_of(config, needs).no_pictures is None
        assert open_planned(config, None).tower is not None
    assert not needs.error
    assert "left unread" not in caplog.text
    text = plan_needs(ToPlan(replace(config, tower_device="none")))
    assert needs.nbytes["cpu"] > text.nbytes["cpu"]


def test_without_a_processor_none_is_planned(tmp_path: Path) -> None:
    folder, _ = folder_of("qwen3_vl", tmp_path)
    for path in folder.glob("*processor_config.json"):
        path.unlink()
    assert open_planned(EngineConfig(model_path=folder), None).tower is None  # as `serve` has it
