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
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.step.step_runtime import StepRuntime
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from ktransformers.profiling.gpu_steps import gpu_calls, gpu_ops
from ktransformers.profiling.records import PARTS
from tests.support.engines.gpu_engines import EXPERTS_ON_CPU, EXPERTS_ON_GPU, rules_of
from tests.support.engines.one_sequence import static_engine
from tests.support.models.agreement import prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("use_cuda_graph", [True, False])
@pytest.mark.parametrize("experts", [EXPERTS_ON_CPU, EXPERTS_ON_GPU])
def test_steps_tell_what_they_did(
    experts: str, use_cuda_graph: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ktransformers.engine.step.gpu_profile._MOST_COST", 1.0)  # every step, however short they are
    model = tiny_model("qwen3_moe", seed=1)
    config, ids = model.config, prompt(model.config.vocab_size)
    write_safetensors(model.bfloat16(), tmp_path)
    with torch.no_grad():
        routers = model.float()(torch.tensor([ids]), output_router_logits=True).router_logits
    want = torch.stack([each.topk(config.num_experts_per_tok, dim=-1)[1].sort(dim=-1)[0] for each in routers])
    rules = rules_of("qwen3_moe", tmp_path, EXPERTS_ON_CPU, experts)
    options = {"cache_lens": 64, "cpu_infer": 2, "hot_experts": "off", "use_cuda_graph": use_cuda_graph}
    asked = EngineConfig(model_path=tmp_path, optimize_config_path=rules, **options)  # type: ignore[arg-type]
    steps = [ids[:-8], *([token] for token in ids[-8:])]
    with closing(static_engine(asked, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
        runtime, logits, differing, num_timed = StepRuntime(engine.runner.steps), list[torch.Tensor](), 0, 0
        for is_on in (False, True):
            if is_on:
                runtime.start()
            first = 0
            for number, step in enumerate(steps):
                began = time.monotonic_ns()
                runtime.begin_step(number, len(step), [len(step) - 1])
                got = engine.runner.forward(step, first, [len(step) - 1]).clone()
                latest, here = runtime.end_step(), want[:, first : first + len(step)]
                ended = time.monotonic_ns()
                first += len(step)
                if latest is None:
                    logits.append(got)
                    continue
                assert torch.equal(got, logits[number])
                ops = gpu_ops(latest)
                parts = {PARTS[part] for part in ops["part"]}
                assert (began <= ops["begin_ns"]).all()
                assert ops["duration_ns"].sum() <= ended - began
                if parts != {"gpu"}:
                    num_timed += 1
                    assert {"attention", "linear", "router", "experts", "lm_head"} <= parts
                    assert ("wait_cpu" in parts) == (experts == EXPERTS_ON_CPU)
                if experts == EXPERTS_ON_GPU:
                    calls = list(gpu_calls(latest))
                    assert sum(int(call.counts.sum()) for call in calls) == here.numel()
                    chosen = torch.stack([torch.tensor(call.ids) for call in calls]).long().sort(dim=-1)[0]
                    differing += int((chosen != here).any(dim=-1).sum())
        runtime.stop()
        assert num_timed > 1  # the prompt's step, and some that were replayed
        assert differing <= 4
