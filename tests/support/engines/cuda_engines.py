"""Engines on a real GPU, and how near their logits must be. Why: see tests/engine/gpu/test_cuda.py."""

from __future__ import annotations

from pathlib import Path

import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.one_sequence import StaticEngine, static_engine

TOLERANCE = 5e-2


def engine_of(path: Path, *, on_gpu: bool, **settings: object) -> StaticEngine:
    config = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=2, **settings)  # type: ignore[arg-type]
    return static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory if on_gpu else dict)))


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= TOLERANCE
    # A row whose router nearly ties may take another expert and differ by more. Of two routers with 8 experts, whose
    # logits are off by some per cent, one ties in about every tenth row; a quarter of them is far from a wrong kernel.
    assert (errors > TOLERANCE).sum() <= len(errors) // 4


def check_beside(got: torch.Tensor, want: torch.Tensor, rounded: torch.Tensor) -> None:
    """Rows of logits [T, V] of a step in bf16, where rounding alone may put them far off, as it does where a state
    carries errors on: rounded is transformers' own model in bf16. Ours rounds at other places, so each of its errors
    differs; their quantiles do not, by more than half and a hundredth. A wrong kernel's are 1 and more."""
    ours, theirs = ((one - want).norm(dim=-1) / want.norm(dim=-1) for one in (got, rounded))
    for share in (0.5, 0.75, 0.9):
        assert ours.quantile(share) <= 1.5 * theirs.quantile(share) + 1e-2
