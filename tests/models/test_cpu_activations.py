"""`--cpu_activations int16` through a whole engine: the numbers of fp32 nearly, whatever shares a step."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.engine.load.reference import build_reference_engine
from ktransformers.errors import ConfigError, UnsupportedError
from tests.support.engines.one_sequence import static_engine

GGUF = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))), DEMO_MODEL_PATH / "missing.gguf")
PROMPT = [7 * i % 1000 + 5 for i in range(40)]


def logits_of(cpu_activations: str, chunks: int = 1) -> torch.Tensor:
    """Of the prompt, in so many steps, and of one more token."""
    config = EngineConfig(gguf_path=GGUF, cpu_infer=2, cache_lens=64, cpu_activations=cpu_activations)
    with closing(static_engine(config)) as engine:
        size, found = len(PROMPT) // chunks, []
        for first in range(0, len(PROMPT), size):
            part = PROMPT[first : first + size]
            found.append(engine.runner.forward(part, first, range(len(part))).clone())
        return torch.cat([*found, engine.runner.forward([11], len(PROMPT), [0])])


def divergence(wanted: torch.Tensor, got: torch.Tensor) -> float:
    """Median over positions of the Kullback-Leibler divergence, in nats."""
    left, right = wanted.double().log_softmax(-1), got.double().log_softmax(-1)
    return float((left.exp() * (left - right)).sum(-1).median())


@pytest.mark.exhaustive
def test_logits_are_nearly_those_of_fp32() -> None:
    """A third of llama.cpp's divergence is asked for, whose activations are as those of int8."""
    reference = build_reference_engine(EngineConfig(gguf_path=GGUF, cache_lens=64))
    wanted = reference.logits([*PROMPT, 11])
    near, far = logits_of("int16"), logits_of("int8")
    assert divergence(wanted, near) < divergence(wanted, far) / 30
    assert torch.equal(logits_of("int16", chunks=8), near)


def test_what_contradicts_itself_is_refused() -> None:
    config = EngineConfig(gguf_path=GGUF, cpu_activations="int16")
    with pytest.raises(UnsupportedError, match="--cpu_activations has no meaning here"):
        build_reference_engine(config)
    with pytest.raises(ConfigError, match="--cpu_prefill bf16 rounds to 8 bits what --cpu_activations int16 keeps"):
        EngineConfig(gguf_path=GGUF, cpu_activations="int16", cpu_prefill="bf16").resolved()
    with pytest.raises(ConfigError, match="--cpu_activations int4 is not one of int8, int16"):
        EngineConfig(gguf_path=GGUF, cpu_activations="int4").resolved()
