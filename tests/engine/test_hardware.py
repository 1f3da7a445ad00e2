"""GPUs are used where the configuration asks for them, and nothing about that is silent."""

from __future__ import annotations

import logging

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine import builder
from ktransformers.engine.builder import Hardware
from ktransformers.optimize.machine import Machine


def found(monkeypatch: pytest.MonkeyPatch, devices: dict[str, int], use_cuda: bool) -> dict[str, int]:
    monkeypatch.setattr(builder, "detect_machine", lambda: Machine(8, 4, devices))
    return dict(Hardware.detect(EngineConfig(use_cuda=use_cuda)).machine.devices)


def test_gpus_are_left_alone_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert found(monkeypatch, {"cpu": 4, "cuda:0": 2}, use_cuda=False) == {"cpu": 4}
    assert "cuda:0 left alone: pass --use_cuda" in caplog.text
    assert found(monkeypatch, {"cpu": 4, "cuda:0": 2}, use_cuda=True) == {"cpu": 4, "cuda:0": 2}
    assert found(monkeypatch, {"cpu": 4}, use_cuda=True) == {"cpu": 4}
    assert "--use_cuda: no GPU can be used" in caplog.text


def test_a_budget_without_gpus_is_said_to_be_idle(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(builder, "detect_machine", lambda: Machine(8, 4, {"cpu": 4}))
    Hardware.detect(EngineConfig(gpu_memory=4.0))
    assert "--gpu_memory has no effect without --use_cuda" in caplog.text
