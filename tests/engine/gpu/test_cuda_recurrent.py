"""Recurrent layers on a real GPU, in prompts' steps and in replayed ones, and of several sequences at once.

The oracle is transformers in fp32, the tolerance what transformers itself loses in bf16.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Hardware, build_engine
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.engines.cuda_engines import check_beside
from tests.support.engines.gpu_engines import logits_in_steps
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.models.recurrent_models import RECURRENT_TYPES, recurrent_config, recurrent_model
from tests.support.models.tiny_models import NUM_EXPERTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTH = 150  # more than two chunks of the chunked scans
ALL = {"num_experts_per_tok": NUM_EXPERTS, "num_experts_per_token": NUM_EXPERTS, "n_group": 1, "topk_group": 1}
"""Every token takes every expert, but where a family knows one only: a near tie in a router would change a state, and
with it all that follows."""


def known(*model_types: str) -> list[str]:
    """Those of them that the installed transformers has, and words as later ones do."""
    found = [model_type for model_type in model_types if model_type in CONFIG_MAPPING]
    return [one for one in found if "recurrent" not in layer_words(one)]


def layer_words(model_type: str) -> list[str]:
    """What kinds of layers are called in its config by the installed transformers, by either name of the list."""
    config = recurrent_config(model_type)
    return [word for name in ("layer_types", "layers_block_type") for word in getattr(config, name, None) or ()]


def some_ids(count: int, seed: int = 7) -> list[int]:
    return torch.randint(3, 160, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("model_type", known(*RECURRENT_TYPES))
def test_agrees_with_transformers(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, ids = recurrent_model(model_type, **({} if model_type == "zaya" else ALL)), some_ids(LENGTH)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
        rounded = model.to(torch.bfloat16)(torch.tensor([ids]), use_cache=False).logits[0].float()
    config = EngineConfig(model_path=tmp_path, cache_lens=256, cpu_infer=2, self_check=False)
    hardware = Hardware(detect_machine(gpus=cuda_memory))
    with caplog.at_level(logging.INFO), closing(static_engine(config, hardware=hardware)) as engine:
        check_beside(logits_in_steps(engine, ids), want, rounded)
        parts = [(i, ids[i : i + 37]) for i in range(0, LENGTH, 37)]
        in_parts = [engine.runner.forward(part, start, range(len(part))).clone() for start, part in parts]
        check_beside(torch.cat(in_parts), want, rounded)
    assert "not replayed" not in caplog.text


@pytest.mark.parametrize("model_type", ["qwen3_next", "nemotron_h"])
def test_sequences_do_not_mix(model_type: str, tmp_path: Path) -> None:
    """Steps of one sequence and of four differ by rounding only: nearly all tokens are the same."""
    recurrent_model(model_type).save_pretrained(tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=2048, cpu_infer=2, self_check=False)
    hardware = Hardware(detect_machine(gpus=cuda_memory))
    paged = build_engine(config, page_size=64, max_batch_size=4, hardware=hardware)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    prompts = [some_ids(length, seed=length) for length in (3, 90, 140, 300)]
    with closing(paged):
        loop = PagedLoop(scheduler_config(paged, num_states=paged.cache.num_states), lambda: paged.executor)
        names = [loop.add(prompt, params) for prompt in prompts]
        loop.drain()
        alone = []
        for prompt in prompts:
            alone.append(loop.add(prompt, params))
            loop.drain()
        answers = [[loop.answers[name].token_ids for name in some] for some in (names, alone)]
    first = [one[0] == other[0] for one, other in zip(*answers, strict=True)]
    assert sum(first) >= 3  # one may be a near tie
