"""On a real GPU, in bf16: prompts replayed between experts that are streamed, or that the host waits for on the CPU.

The same as padded steps that are not replayed, `==`, and as transformers in fp32 within the tolerance of
tests/engine/test_cuda.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine import prefill as prefill_module
from ktransformers.engine import step_sizes
from ktransformers.engine.builder import Engine, Hardware, build_engine
from ktransformers.engine.graphs import CudaGraphs
from ktransformers.kernels.types import QuantType
from ktransformers.models.registry import RULES_DIR
from ktransformers.operators import device as device_module
from ktransformers.operators.device import cuda_memory
from ktransformers.operators.experts import routed
from ktransformers.operators.experts.split import NEVER, CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import ExpertPrefill
from ktransformers.optimize.machine import detect_machine
from tests.support.agreement import dequantized, logits_of, prompt
from tests.support.cuda_engines import TOLERANCE
from tests.support.gguf_writer import write_gguf
from tests.support.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ALL_STREAMED = CpuRate((1,), (100.0,))
SOME_STREAMED = CpuRate((1,), (1e-3,))


def logits_in_chunks(engine: Engine, ids: list[int], rows: int) -> torch.Tensor:
    """Of the last token of each chunk."""
    parts = [(start, ids[start : start + rows]) for start in range(0, len(ids), rows)]
    return torch.cat([engine.runner.forward(part, start, [len(part) - 1]).clone() for start, part in parts])


@pytest.mark.parametrize("rate", [ALL_STREAMED, SOME_STREAMED, None])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen2_moe", "gpt_oss"])
def test_replayed_prompts(
    model_type: str,
    rate: CpuRate | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Chunks that fill their size, and one that does not. rate: of the CPU; None: it computes all experts, of more rows
    than the stream hands over. Where some are streamed, which they are depends on how far copies have come."""

    def calibrate(prefill: ExpertPrefill, *args: object) -> None:
        prefill.threshold = NEVER if rate is None else 2
        prefill.rates = None if rate is None else PrefillRates(1e-3, 0.0, rate, rate)

    monkeypatch.setattr(prefill_module, "calibrate", calibrate)
    for module in (device_module, routed, step_sizes):
        monkeypatch.setattr(module, "STREAM_ROWS", 32)
    rows = 64  # of graphs
    model = tiny_model(model_type, seed=3)
    qtype = QuantType.MXFP4 if model_type == "gpt_oss" else QuantType.Q8_0
    path = write_gguf(model, tmp_path / "model.gguf", qtype)
    ids = (prompt(model.config.vocab_size) * 100)[: 3 * rows - 10]
    got = []
    for use_cuda_graph in (None, False):
        config = EngineConfig(
            gguf_path=path,
            cache_lens=4 * rows,
            chunk_size=rows,
            cpu_infer=2,
            optimize_config_path=RULES_DIR / "default-moe.yaml",
            attention_backend="triton",
            use_cuda_graph=use_cuda_graph,
        )
        hardware = Hardware(detect_machine(gpus=cuda_memory), graph_rows=(rows,))
        with caplog.at_level(logging.INFO), closing(build_engine(config, hardware=hardware)) as engine:
            got.append(logits_in_chunks(engine, ids, rows))
    assert f"captured steps of {rows} rows in" in caplog.text
    assert "not replayed" not in caplog.text
    assert rate is SOME_STREAMED or torch.equal(*got)
    want = logits_of(dequantized(model, qtype, QuantType.F32), ids)
    want = want[[min(start + rows, len(ids)) - 1 for start in range(0, len(ids), rows)]]
    errors = (got[0] - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= TOLERANCE  # a row whose router nearly ties may take another expert


def test_a_capture_that_fails_leaves_the_device_to_others() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, ones = CudaGraphs([device]), torch.ones(4, device=device)

    def work(cut: Callable[[], None]) -> torch.Tensor:
        twice = ones * 2
        cut()
        return (twice + 1) * 3

    def broken(cut: Callable[[], None]) -> torch.Tensor:
        work(cut)
        raise torch.OutOfMemoryError("no room")

    graphs.warm_up(lambda: work(lambda: None))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        graphs.capture_pieces(broken)
    pieces, result = graphs.capture_pieces(work)
    assert len(pieces) == 2
    ones.fill_(5)
    for piece in pieces:
        piece.replay()
    assert result.tolist() == [33.0] * 4
