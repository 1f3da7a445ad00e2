"""On a real GPU, in bf16: models whose experts are there, or are streamed there, in the types that experts come in.

The oracle and the tolerance are those of tests/engine/gpu/test_cuda.py.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.step import expert_streaming as prefill_module
from ktransformers.kernels.types import QuantType
from ktransformers.operators.device import cuda_memory
from ktransformers.operators.experts.split import CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.optimize.machine import detect_machine
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.cuda_engines import check
from tests.support.engines.gpu_engines import logits_in_steps
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import dequantized, logits_of, prompt
from tests.support.models.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SLOW = CpuRate((1,), (100.0,))


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("model_type", "kind"), [("gpt_oss", "MXFP4"), ("gpt_oss", "BF16"), ("qwen3_moe", "BF16"), ("qwen3_moe", "F16")]
)
def test_experts_agree_with_transformers(
    model_type: str, kind: str, is_streamed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt and steps of one row, which are replayed graphs. Streamed: by a CPU that is said to be slow."""

    def calibrate(prefill: ExpertPrefill, *args: object) -> None:
        prefill.rates, prefill.threshold = PrefillRates(1e-3, 0.0, SLOW, SLOW), 2

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)
    model, qtype = tiny_model(model_type, seed=3), QuantType[kind]
    path = write_gguf(model, tmp_path / "model.gguf", qtype)
    ids = prompt(model.config.vocab_size)
    want = logits_of(dequantized(model, qtype, QuantType.F32), ids)
    rules = shipped_path("default-moe.yaml") if is_streamed else None
    options = {"cache_lens": 64, "cpu_infer": 2, "hot_experts": "off"}
    config = EngineConfig(gguf_path=path, optimize_config_path=rules, **options)  # type: ignore[arg-type]
    with closing(static_engine(config, hardware=Hardware(detect_machine(gpus=cuda_memory)))) as engine:
        experts = [entry for entry in engine.plan.entries if entry.operator == "KTransformersExperts"]
        assert {entry.placement.generate_device for entry in experts} == {"cpu" if is_streamed else "cuda:0"}
        got = logits_in_steps(engine, ids)
        streams = [one for one in engine.plan.devices["cuda:0"].services if hasattr(one, "prefill")]
        assert bool(streams) == is_streamed
        assert all(stream.prefill.last_split is not None for stream in streams)
    check(got, want)
