"""Qwen4's layer for multi-token prediction, whose hidden states are streams, drafts what its reference would."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.engines.drafter_steps import draft_in_every_step
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.mtp_engines import check_engine, engine_of
from tests.support.gguf.qwen4_mtp import tiny_qwen4_mtp, write_qwen4_mtp, write_qwen4_mtp_gguf


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are drafted in each step, however few are right."""
    draft_in_every_step(monkeypatch)


def test_drafts_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_qwen4_mtp()
    with engine_of(write_qwen4_mtp(tiny, tmp_path)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


def test_drafts_are_those_of_the_reference_from_a_gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_qwen4_mtp()
    with engine_of(write_qwen4_mtp_gguf(tiny, tmp_path / "tiny.gguf")) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)


@pytest.mark.exhaustive
def test_drafts_on_a_gpu_are_those_of_the_reference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_qwen4_mtp()
    with engine_of(write_qwen4_mtp(tiny, tmp_path), fake_hardware(1)) as engine:
        check_engine(engine, tiny, monkeypatch, num_tokens=12)
