"""`--cpu_prefill bf16` through a whole engine: near the exact one, or the exact one where the processor cannot."""

from __future__ import annotations

import logging

import pytest
import torch

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import Isa, base
from tests.support.engines.one_sequence import static_engine

GGUF = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))), DEMO_MODEL_PATH / "missing.gguf")
PROMPT = [7 * i % 1000 + 5 for i in range(40)]


def logits_of(cpu_prefill: str, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the prompt in one step, and of one more token."""
    engine = static_engine(EngineConfig(gguf_path=GGUF, cpu_infer=2, cache_lens=64, cpu_prefill=cpu_prefill))
    try:
        whole = engine.runner.forward(prompt, 0, range(len(prompt)))
        return whole, engine.runner.forward([11], len(prompt), [0])
    finally:
        engine.runner.pool.close()


def use(isa: Isa, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (cpu, base):
        monkeypatch.setattr(module, "active_isa", lambda: isa)


@pytest.mark.exhaustive
def test_prefill_in_bf16_is_near_the_exact_one(monkeypatch: pytest.MonkeyPatch) -> None:
    use(Isa.AVX512_BF16_EMULATED, monkeypatch)
    exact, near = logits_of("int8", PROMPT), logits_of("bf16", PROMPT)
    for want, got in zip(exact, near, strict=True):
        assert not torch.equal(want, got)  # the second by way of the cache
        assert float((want - got).norm() / want.norm()) < 0.05
    short = logits_of("int8", PROMPT[:31]), logits_of("bf16", PROMPT[:31])
    assert all(torch.equal(*pair) for pair in zip(*short, strict=True))


def test_without_the_instructions_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use(cpu.available_isas()[min(1, len(cpu.available_isas()) - 1)], monkeypatch)  # AVX2 or scalar
    with caplog.at_level(logging.WARNING):
        got = logits_of("bf16", PROMPT)
    assert [record.message for record in caplog.records if "cpu_prefill" in record.message] == [
        f"cpu_prefill bf16: {cpu.active_isa().value} has no products of bf16 (AMX and AVX512-BF16 have); "
        "prefill stays exact, in int8"
    ]
    assert all(torch.equal(*pair) for pair in zip(logits_of("int8", PROMPT), got, strict=True))


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="--cpu_prefill fp16 is not one of int8, bf16"):
        EngineConfig(gguf_path=GGUF, cpu_prefill="fp16").resolved()
