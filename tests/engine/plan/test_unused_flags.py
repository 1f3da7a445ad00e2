"""Flags that change nothing in a plan are said, and those that do are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF

STORED = "--cpu_quant has no effect: no experts are stored as F32, F16, BF16 or FP8"
IN_RAM = "--experts_ram has no effect: no experts are read from the disk (--experts_from disk)"
NO_DRAFTS = "--speculative_tokens has no effect: --speculative off drafts nothing"


@pytest.mark.parametrize(
    ("weights", "options", "said"),
    [
        (DEMO_GGUF, {"cpu_quant": "q4_k"}, [STORED]),
        (DEMO_CHECKPOINT, {"cpu_quant": "q4_k"}, []),
        (DEMO_CHECKPOINT, {"experts_ram": 1.0}, [IN_RAM]),
        (DEMO_GGUF, {"experts_ram": 1.0, "experts_from": "disk"}, []),
        (DEMO_GGUF, {"experts_ram": 1.0, "cpu_quant": "q8_0"}, [IN_RAM, STORED]),
        (DEMO_GGUF, {"speculative": "off", "speculative_tokens": 3}, [NO_DRAFTS]),
        (DEMO_GGUF, {"speculative_tokens": 3}, []),
    ],
)
def test_flags_without_effect(
    weights: Path, options: dict[str, Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plan_model(EngineConfig(gguf_path=weights, use_cuda=False, cpu_infer=1, **options))
    assert [message for message in caplog.messages if "has no effect" in message] == said
