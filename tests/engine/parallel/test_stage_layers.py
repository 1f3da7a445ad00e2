"""Layers of a stage keep the numbers that they have in the model, in all that is told of them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from ktransformers import profiling
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.parallel.pipeline.link import StageLink
from ktransformers.engine.parallel.pipeline.stages import cut_stage
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.engines.stage_engines import IDS, engine_of, logits
from tests.support.models.demo import DEMO_GGUF
from tests.support.models.tiny_models import tiny_model, write_safetensors

PARAMS = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.mark.exhaustive
def test_experts_on_the_gpu_of_a_stage(tmp_path: Path) -> None:
    """Layers 2 and 3 of 4, against the choices of `transformers`."""
    pytest.importorskip("triton")
    model = tiny_model("qwen3_moe", seed=1, num_hidden_layers=4)
    write_safetensors(model.bfloat16(), tmp_path)
    model = model.float()
    with torch.no_grad():
        routed = model(torch.tensor([IDS]), output_router_logits=True).router_logits
    chosen = [each.topk(model.config.num_experts_per_tok, dim=-1)[1].flatten() for each in routed[2:]]
    counts = [each.bincount(minlength=model.config.num_experts) for each in chosen]
    want = torch.stack([*[torch.zeros_like(counts[0])] * 2, *counts])
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, EXPERTS_ON_GPU)
    with closing(engine_of(tmp_path, 2, on_gpu=True, optimize_config_path=rules)) as engine:
        (usage,) = engine.plan.devices.usages()
        before = usage.counts.clone()
        logits(engine, IDS, 0)
        assert torch.equal(usage.counts - before, want)


@pytest.mark.exhaustive
def test_a_profile_of_stages_on_the_cpu(tmp_path: Path) -> None:
    profiles = []
    for num_stages in (1, 2):
        folder = tmp_path / str(num_stages)
        with LLM(DEMO_GGUF, cache_lens=128, cpu_infer=1, pipeline=num_stages, profile=folder) as llm:
            llm.generate(["Once upon a time"], PARAMS)
        profiles.append(profiling.load(folder))
    one, two = profiles
    expert_bytes = (0, 0, *one.meta.model.expert_bytes[2:])
    assert two.meta.model == msgspec.structs.replace(one.meta.model, expert_bytes=expert_bytes)
    experts, of_stage = one.tokens["experts"], two.tokens["experts"]
    assert experts.shape == of_stage.shape
    assert (of_stage[:, :2] == -1).all()
    assert np.array_equal(experts[:, 2:], of_stage[:, 2:])
    times = two.tokens["layers_us"][1:]  # of decode steps
    assert not times[:, :2].any()
    assert times[:, 2:].all()


def test_experts_of_a_token_are_asked_for_by_the_layer_s_number(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1, num_hidden_layers=4)
    write_safetensors(model, tmp_path)
    whole = open_model(EngineConfig(model_path=tmp_path))
    facts = replace(whole.facts, experts=replace(whole.facts.experts, top_k=(1, 2, 3, 4)))  # type: ignore[type-var]
    part = cut_stage(replace(whole, facts=facts), StageLink(1, 2)).facts
    assert [part.top_k(layer) for layer in (-1, 1, 2, 3, 4)] == [0, 0, 3, 4, 0]
    assert [facts.top_k(layer) for layer in (-1, 0, 3, 4)] == [0, 1, 4, 0]
