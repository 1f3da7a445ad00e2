"""What agreement with `transformers` is measured with: types, tolerances, prompts, logits, dequantized twins."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.kernels.types import QuantType, block_size
from tests.support.checks.decoding import decoded
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.models.low_bits import encode

NAMED = ["qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral", "llama", "qwen3"]
GENERIC = ["olmoe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "granitemoe", "minimax_m2", "phimoe", "dots1", "qwen2"]
TYPES = [*NAMED, *GENERIC, "hunyuan_v1_moe", "deepseek_v4"]
TOLERANCE, INT8_TOLERANCE = 1e-4, 3e-2
"""Of fp32 on both sides, and of int8 activations; why: tests/models/test_agreement.py and test_gguf_models.py."""


def prompt(vocab_size: int, length: int = 24) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(7)).tolist()


def engine_of(folder: Path, **settings: object) -> StaticEngine:
    return static_engine(EngineConfig(model_path=folder, cache_lens=64, cpu_infer=1, **settings))  # type: ignore[arg-type]


def logits_of(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


def dequantized(model: PreTrainedModel, experts_qtype: QuantType, dense_qtype: QuantType) -> PreTrainedModel:
    """A copy whose matrices went through the file's types and back, by the `gguf` package's dequantization."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if parameter.dim() < 2 or name.endswith(("mlp.gate.weight", "router.weight", "bias")):
                continue
            qtype = experts_qtype if ".experts." in name else dense_qtype
            if model.config.model_type == "gpt_oss" and ".experts." in name:
                parameter = parameter.transpose(1, 2)  # a view: the file has them the other way round
            if parameter.shape[-1] % block_size(qtype):
                qtype = QuantType.Q8_0 if parameter.shape[-1] % 32 == 0 else QuantType.F16
            rows = parameter.float().contiguous().numpy().reshape(-1, parameter.shape[-1])
            packed = encode(rows, qtype)
            parameter.copy_(torch.from_numpy(decoded(packed, qtype)).view(parameter.shape))
    return twin
