"""On a real GPU: experts that were chosen there, and parts of steps, captured in graphs.

The oracle of the choice is `transformers` in fp32. A row whose router nearly ties may take another expert in bf16.
"""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.builder import Hardware, build_engine
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from tests.support.agreement import prompt
from tests.support.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.tiny_models import tiny_model, write_safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("use_cuda_graph", [True, False])
@pytest.mark.parametrize("experts", [EXPERTS_ON_CPU, EXPERTS_ON_GPU])
def test_steps_tell_what_they_did(experts: str, use_cuda_graph: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", seed=1)
    config, ids = model.config, prompt(model.config.vocab_size)
    write_safetensors(model.bfloat16(), tmp_path)
    with torch.no_grad():
        routers = model.float()(torch.tensor([ids]), output_router_logits=True).router_logits
    want = torch.stack([each.topk(config.num_experts_per_tok, dim=-1)[1].sort(dim=-1)[0] for each in routers])
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, experts)
    asked = EngineConfig(
        model_path=tmp_path, cache_lens=64, cpu_infer=2, optimize_config_path=rules, use_cuda_graph=use_cuda_graph
    )
    steps = [ids[:-8], *([token] for token in ids[-8:])]
    with closing(build_engine(asked, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
        logits, differing = list[torch.Tensor](), 0
        for is_on in (False, True):
            profile, first, begins = engine.runner.profile_gpus(is_on), 0, 0
            for number, step in enumerate(steps):
                began = time.monotonic_ns()
                got = engine.runner.forward(step, first, [len(step) - 1]).clone()
                ended = time.monotonic_ns()
                first += len(step)
                if profile is None:
                    logits.append(got)
                    continue
                assert torch.equal(got, logits[number])
                latest = profile.latest
                assert latest is not None
                for spans in latest.spans.values():
                    assert began <= spans[0].begin
                    assert sum(span.duration for span in spans) <= ended - began
                    assert {"attention", "linear", "router", "experts", "lm_head"} <= {s.label.part for s in spans}
                    assert ("wait_cpu" in {s.label.part for s in spans}) == (experts == EXPERTS_ON_CPU)
                    begins += 1
                if experts == EXPERTS_ON_GPU:
                    assert latest.counts is not None
                    assert latest.counts.sum() == len(step) * config.num_experts_per_tok * config.num_hidden_layers
                    here = want[:, first - len(step) : first]
                    chosen = torch.stack([torch.tensor(latest.ids[i]) for i in range(len(here))]).long()
                    differing += int((chosen.sort(dim=-1)[0] != here).any(dim=-1).sum())
        assert begins > 1  # the prompt's step, and some that were replayed
        assert differing <= 4
