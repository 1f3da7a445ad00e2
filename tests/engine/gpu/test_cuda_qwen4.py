"""Qwen3.8-Flash-Next on a real GPU: sparse attention, residual streams and n-grams that the CPU looks up for steps that
are replayed, and held until their tokens are known.

The oracle is transformers in fp32, the tolerance what transformers itself loses in bf16.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Hardware, build_engine
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.cuda_engines import check_beside
from tests.support.engines.gpu_engines import logits_in_steps
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.models.pooled_models import EOS, pooled_model
from tests.support.models.tiny_models import NUM_EXPERTS, VOCAB_SIZE, write_safetensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not hasattr(MtpModel, "forward_layer"), reason="transformers 5.24 has these layers' names"),
]

LENGTH = 150


def tiny(**values: object) -> PreTrainedModel:
    """All pools but a few are chosen, and all experts: near ties in bf16 would choose others."""
    budget = LENGTH // 4 * 4 - 8
    return pooled_model("qwen4_exp_text", num_experts_per_tok=NUM_EXPERTS, indexer_budget=budget, hc_count=4, **values)


def some_ids(count: int, seed: int = 7) -> list[int]:
    ids = torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [EOS if at % 13 in (5, 7) else token for at, token in enumerate(ids)]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("rules", [None, "Qwen4Exp.yaml"])
def test_agrees_with_transformers(
    rules: str | None, graphs: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, ids = tiny().to(torch.bfloat16), some_ids(LENGTH)
    write_safetensors(model, tmp_path)
    model.float()  # the same weights, which experts on a GPU want in no more bits
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0]
        rounded = model.to(torch.bfloat16)(torch.tensor([ids]), use_cache=False).logits[0].float()
    where: dict[str, Any] = {} if rules is None else {"optimize_config_path": shipped_path(rules)}
    config = EngineConfig(model_path=tmp_path, cache_lens=256, cpu_infer=2, use_cuda_graph=graphs, **where)
    hardware = Hardware(detect_machine(gpus=cuda_memory))
    with caplog.at_level(logging.INFO), closing(static_engine(config, hardware=hardware)) as engine:
        places = {entry.key: entry.placement.generate_device for entry in engine.plan.entries}
        assert places["model.layers.0.ple"] == "cuda:0"
        assert ("cpu" in {place for key, place in places.items() if key.endswith(".experts")}) == (rules is not None)
        check_beside(logits_in_steps(engine, ids), want, rounded)
        for size in (37, 100):  # of few rows and of many, which come by pinned memory of their own
            parts = [(at, ids[at : at + size]) for at in range(0, LENGTH, size)]
            got = [engine.runner.forward(part, start, range(len(part))).clone() for start, part in parts]
            check_beside(torch.cat(got), want, rounded)
    assert "not replayed" not in caplog.text


def test_sequences_and_prefixes_do_not_mix(tmp_path: Path) -> None:
    """Steps of one sequence and of four, and behind a cached prefix, differ by rounding only."""
    write_safetensors(tiny(), tmp_path)
    config = EngineConfig(model_path=tmp_path, cache_lens=2048, cpu_infer=2)
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    shared = some_ids(130, seed=1)
    prompts = [shared[:length] + some_ids(10, seed=length) for length in (3, 70, 130, 130)]
    hardware = Hardware(detect_machine(gpus=cuda_memory))
    with closing(build_engine(config, page_size=64, max_batch_size=4, hardware=hardware)) as paged:
        loop = PagedLoop(scheduler_config(paged, num_states=paged.cache.num_states), lambda: paged.executor)
        names = [loop.add(prompt, params) for prompt in prompts]
        loop.drain()
        again = []
        for prompt in prompts:
            again.append(loop.add(prompt, params))
            loop.drain()
        assert loop.scheduler.stats().prefix_hit_len > 0
        answers = [[loop.answers[name].token_ids for name in some] for some in (names, again)]
    assert answers[0][2] == answers[0][3]  # the same prompt, side by side
    first = [one[0] == other[0] for one, other in zip(*answers, strict=True)]
    assert sum(first) >= 3  # one may be a near tie
