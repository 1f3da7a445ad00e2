"""GGUF end to end: `--gguf_path` alone, against `transformers` in fp32 on the same weights.

F32 files must agree as closely as safetensors do (tests/models/test_agreement.py). For quantized files the oracle is
`transformers` on the dequantized weights; the kernels' int8 activations then cost, per product of K terms, a random
walk of steps of relative size 1/127/sqrt(12) = 0.2 %, which residual streams of a few layers raise to about 1 %.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from gguf import GGUFReader

from ktransformers.config import EngineConfig
from ktransformers.kernels import cpu
from ktransformers.kernels.cpu import PACKED_TYPES
from ktransformers.kernels.types import QuantType
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import GENERIC, INT8_TOLERANCE, NAMED, TOLERANCE, dequantized, logits_of, prompt
from tests.support.models.grid_blocks import GRID_TYPES
from tests.support.models.tiny_models import tiny_model

BF16_TOLERANCE = 1e-2 if cpu.has_bf16(cpu.active_isa()) else TOLERANCE


def engine_types(engine: StaticEngine) -> set[QuantType]:
    """What the plan says that weights are."""
    return {QuantType[name] for entry in engine.plan.entries for name in entry.quant_types}


def open_engine(path: Path, **settings: object) -> StaticEngine:
    return static_engine(EngineConfig(gguf_path=path, cache_lens=64, **{"cpu_infer": 1, **settings}))  # type: ignore[arg-type]


@pytest.mark.every(5)
@pytest.mark.parametrize("model_type", NAMED + GENERIC)
def test_f32_file_agrees_with_transformers(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=1)
    engine = open_engine(write_gguf(model, tmp_path / "model.gguf"))
    ids = prompt(model.config.vocab_size)
    want, got = logits_of(model, ids), engine.runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
    assert torch.equal(got.argmax(-1), want.argmax(-1))


TYPES = ["Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "BF16", "F16"]
LOW_BITS = sorted({qtype.name for qtype in PACKED_TYPES - set(GRID_TYPES)} - set(TYPES))


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("model_type", "qtype"),
    [
        *itertools.product(["qwen3_moe", "deepseek_v3"], TYPES),
        *(("qwen3_moe", qtype) for qtype in LOW_BITS),
        *(("qwen3_moe", qtype.name) for qtype in GRID_TYPES),
        ("deepseek_v3", "IQ2_XXS"),
    ],
)
def test_quantized_file_agrees_with_dequantized_weights(model_type: str, qtype: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=3, hidden=256)
    kind = QuantType[qtype]
    engine = open_engine(write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole"))
    ids = prompt(model.config.vocab_size)
    want, got = logits_of(dequantized(model, kind, kind), ids), engine.runner.forward(ids, 0, range(len(ids)))
    tolerance = {"F16": TOLERANCE, "BF16": BF16_TOLERANCE}.get(qtype, INT8_TOLERANCE)
    assert kind in engine_types(engine)
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    # A row whose router nearly ties may take another expert and differ by more: the median row must not.
    assert errors.median() <= tolerance
    assert (errors > tolerance).sum() <= 3


@pytest.mark.every(3)
@pytest.mark.parametrize("qtype", GRID_TYPES, ids=lambda qtype: qtype.name)
def test_types_with_grids_stay_what_they_are(
    qtype: QuantType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the plan, and in memory in at most 5 % more bytes than the file has."""
    model = tiny_model("qwen3_moe", seed=3, hidden=512, layers=1)
    engine = open_engine(write_gguf(model, tmp_path / "model.gguf", qtype, qtype))
    assert "are held as" not in caplog.text
    entry = next(entry for entry in engine.plan.entries if entry.key.endswith("mlp.experts"))
    assert entry.quant_types == (qtype.name,)
    stored = sum(tensor.n_bytes for tensor in GGUFReader(tmp_path / "model.gguf").tensors if "_exps" in tensor.name)
    assert 0 < stored <= entry.nbytes["cpu"] <= 1.05 * stored


@pytest.mark.parametrize("hidden", [64, 256])
def test_same_logits_with_any_threads_and_chunks(hidden: int, tmp_path: Path) -> None:
    """Experts 96 wide (no multiple of a K-quant block) and 256 wide; exact whatever splits the work."""
    model = tiny_model("qwen2_moe", seed=4, hidden=hidden)
    path = write_gguf(model, tmp_path / "model.gguf", QuantType.Q4_K, QuantType.Q6_K)
    ids = prompt(model.config.vocab_size, 33)
    whole = open_engine(path).runner.forward(ids, 0, range(len(ids)))
    for threads in (1, 2, 3):
        runner = open_engine(path, cpu_infer=threads).runner
        for size in (1, 7, 33):
            chunks = [(at, ids[at : at + size]) for at in range(0, len(ids), size)]
            parts = [runner.forward(chunk, at, range(len(chunk))) for at, chunk in chunks]
            assert torch.equal(torch.cat(parts), whole), (threads, size)
