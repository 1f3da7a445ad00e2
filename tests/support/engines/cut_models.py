"""What processes of a model that is cut run on in tests: a GPU that is made up, which adds up by gloo."""

from __future__ import annotations

import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from tests.support.engines.fake_gpus import fake_hardware

HARDWARE = "tests.support.engines.cut_models:detect"
BF16 = "tests.support.engines.cut_models:detect_bf16"


def detect(config: EngineConfig) -> Hardware:
    return fake_hardware()


def detect_little(config: EngineConfig) -> Hardware:
    """A GPU that holds nothing."""
    return fake_hardware(gpu_bytes=1 << 20)


def detect_bf16(config: EngineConfig) -> Hardware:
    """A GPU that computes in bf16, as real ones do."""
    return fake_hardware(dtype=torch.bfloat16)
