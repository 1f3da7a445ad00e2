"""A family of the user's, registered with transformers' Auto classes, whose router is like none that kernels know."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from ktransformers.config import EngineConfig
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.experts.router import KRouter
from tests.support.engines.gpu_engines import gpu_engine, logits_in_steps
from tests.support.engines.one_sequence import static_engine
from tests.support.models.family_models import LENGTH, STEPS
from tests.support.models.family_outcomes import check_agrees
from tests.support.models.tiny_models import random_model, tiny_config, write_safetensors

GROUPS = 2
IDS = [3 + 7 * i % 90 for i in range(19)]


class CentredMoeConfig(Qwen3MoeConfig):
    model_type = "centred_moe"


class CentredRouter(nn.Module):
    """Chooses by sigmoid scores less the mean of their group, weighs by a softmax of the squares of the scores, each at
    its expert's own temperature."""

    def __init__(self, config: CentredMoeConfig) -> None:
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.sharpness = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden_states.reshape(-1, self.weight.shape[1]), self.weight)
        scores = logits.sigmoid()
        groups = scores.unflatten(-1, (GROUPS, -1))
        ids = (groups - groups.mean(-1, keepdim=True)).flatten(-2).topk(self.top_k, dim=-1)[1]
        squares = scores.gather(-1, ids).square()
        return logits, (squares * self.sharpness.exp()[ids]).softmax(-1), ids


class CentredMoeForCausalLM(Qwen3MoeForCausalLM):
    config_class = CentredMoeConfig

    def __init__(self, config: CentredMoeConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.gate = CentredRouter(config)
        self.post_init()


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    AutoConfig.register("centred_moe", CentredMoeConfig)
    AutoModelForCausalLM.register(CentredMoeConfig, CentredMoeForCausalLM)
    yield
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    del CONFIG_MAPPING._extra_content["centred_moe"], MODEL_FOR_CAUSAL_LM_MAPPING._extra_content[CentredMoeConfig]


@pytest.fixture(scope="module")
def model(registered: None) -> PreTrainedModel:
    values = tiny_config("qwen3_moe").to_dict()
    del values["model_type"]
    return random_model(CentredMoeConfig(**values), make=CentredMoeForCausalLM)


@pytest.fixture(scope="module", params=["stacked", "single"])
def folder(request: pytest.FixtureRequest, model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts as parameters [E, ...] of the module, or a matrix each."""
    made = write_safetensors(model, tmp_path_factory.mktemp(request.param))
    tensors = safetensors.torch.load_file(made / "model.safetensors")
    stacked = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    assert len(stacked) == 4
    if request.param == "single":
        for name, matrices in stacked.items():
            key, part = name.rsplit(".", 1)
            for i, matrix in enumerate(matrices):
                parts = [part] if part == "down_proj" else ["gate_proj", "up_proj"]
                for one, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    tensors[f"{key}.{i}.{one}.weight"] = rows.contiguous()
        safetensors.torch.save_file(tensors, made / "model.safetensors", {"format": "pt"})
    return made


def test_it_runs_on_the_cpu(model: PreTrainedModel, folder: Path) -> None:
    config = EngineConfig(model_path=folder, cache_lens=LENGTH + STEPS, cpu_infer=1)
    with closing(static_engine(config)) as engine:
        check_agrees(model, engine)
        gate, experts = (engine.plan.operators[f"model.layers.1.mlp.{name}"] for name in ("gate", "experts"))
        assert isinstance(gate, KRouter)
        assert gate.spec is None
        assert isinstance(experts, KTransformersExperts)


def test_it_runs_on_a_gpu(model: PreTrainedModel, folder: Path) -> None:
    with torch.no_grad():
        want = model(torch.tensor([IDS])).logits[0]
    with closing(gpu_engine(folder)) as engine:
        got = logits_in_steps(engine, IDS)
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
