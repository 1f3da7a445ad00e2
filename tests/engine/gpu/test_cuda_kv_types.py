"""Keys and values in 8 bits on a real GPU. The oracle is our own engine on the CPU, which keeps them in the same type.

Rows in bf16 are rounded to codes as rows in fp32 are, but for those near the border of two codes; that is a random step
of what the type rounds anyway, in few of the numbers, so that the tolerance stays that of test_cuda.py.
"""

from __future__ import annotations

import logging
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware, build_engine
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.optimize.machine import detect_machine
from ktransformers.scheduler.records import StepPlan
from tests.engine.step.test_latent_prefill import rules_with
from tests.support.engines.cuda_engines import check, engine_of
from tests.support.engines.gpu_engines import logits_in_steps, sequence_start, step_row
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

KV_TYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_the_cpu(model_type: str, kv_type: str, tmp_path: Path) -> None:
    """A prefill and replayed decode steps: norms before the rotation, windows with sinks, latents."""
    model, kind = tiny_model(model_type, seed=3, hidden=256), QuantType.Q8_0
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    ids, found = prompt(model.config.vocab_size), []
    for on_gpu in (True, False):
        with closing(engine_of(path, on_gpu=on_gpu, kv_type=kv_type)) as engine:
            kept = {tensor.dtype for name, tensor in engine.runner.cache.tensors().items() if name.endswith(".keys")}
            assert kept == {KV_TYPES[kv_type]}
            assert engine.runner.cache.is_on_gpu(0) is on_gpu
            found.append(logits_in_steps(engine, ids).float().cpu())
    check(*found)


@pytest.mark.parametrize("kv_type", KV_TYPES)
@pytest.mark.parametrize("absorbs", [True, False])
def test_long_prompts_of_latents(absorbs: bool, kv_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """300 rows, absorbed and on expanded keys, beside the CPU's; no kernel is compiled in a step."""
    model = tiny_model("deepseek_v3", seed=3, kv_lora_rank=128, max_position_embeddings=1024)
    write_safetensors(model, tmp_path)
    rules = rules_with(absorbs, tmp_path)
    ids, found = prompt(model.config.vocab_size, 300), []
    for gpus in (cuda_memory, dict):
        config = EngineConfig(
            model_path=tmp_path, cache_lens=512, chunk_size=512, cpu_infer=2, kv_type=kv_type,
            optimize_config_path=rules if gpus is cuda_memory else None,
        )  # fmt: skip
        with closing(static_engine(config, hardware=Hardware(detect_machine(gpus=gpus)))) as engine:
            caplog.clear()
            found.append(logits_in_steps(engine, ids).float().cpu())
            assert "while serving" not in caplog.text
    check(*found)


@pytest.mark.parametrize("kv_type", KV_TYPES)
def test_replayed_steps_are_those_that_run_kernel_by_kernel(
    kv_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two sequences that share steps on scattered pages: the same tokens, whatever launches the kernels."""
    model = tiny_model("qwen3_moe", seed=3, hidden=256)
    write_safetensors(model, tmp_path)
    ids, tables = prompt(model.config.vocab_size), [[9, 2, 7], [4, 0, 5]]
    tokens: list[list[int]] = [[], []]
    for found, uses_graphs in zip(tokens, (True, False), strict=True):
        config = EngineConfig(
            model_path=tmp_path, cache_lens=256, cpu_infer=2, kv_type=kv_type, use_cuda_graph=uses_graphs
        )  # fmt: skip
        hardware = Hardware(detect_machine(gpus=cuda_memory))
        with (
            caplog.at_level(logging.INFO),
            closing(build_engine(config, page_size=16, max_batch_size=2, hardware=hardware)) as paged,
        ):
            starts = [sequence_start(0, ids[:20]), sequence_start(1, ids[:9])]
            rows = [step_row(0, ids[:20], 0, tables[0]), step_row(1, ids[:9], 0, tables[1])]
            plan = StepPlan(step_id=0, ended=[], starts=starts, rows=rows)
            for number in range(1, 12):
                last = [result.token_id for result in paged.executor.execute(plan).results]
                found += last
                rows = [step_row(i, [last[i]], (20, 9)[i] + number - 1, tables[i]) for i in (0, 1)]
                plan = StepPlan(step_id=number, ended=[], starts=[], rows=rows)
    assert tokens[0] == tokens[1]
