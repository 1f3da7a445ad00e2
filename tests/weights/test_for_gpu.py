"""What a GPU is given of types that only the CPU's kernels read: other types with the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as T

from ktransformers.models.facts import ModelFacts
from ktransformers.weights.for_gpu import ForGpu
from ktransformers.weights.gguf import open_gguf
from ktransformers.weights.gguf_source import GGUFSource
from tests.support.gguf_writer import write_gguf
from tests.support.source_checks import layout_of, values_of
from tests.support.tiny_models import tiny_model

NAME, EXPERTS = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts"
BECOMES = {T.Q5_0: T.Q8_0, T.IQ4_NL: T.Q8_0, T.Q3_K: T.Q6_K, T.TQ2_0: T.Q4_0, T.NVFP4: T.BF16}
STAYS = {T.Q4_K: T.Q4_K, T.Q2_K: T.Q2_K, T.Q4_1: T.Q4_1}


@pytest.mark.parametrize("qtype", [*BECOMES, *STAYS], ids=lambda t: t.name)
def test_facts_and_tensors_agree_and_keep_their_numbers(qtype: T, tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", hidden=256)
    plain = GGUFSource(open_gguf(write_gguf(model, tmp_path / "m.gguf", qtype, qtype)), ModelFacts.of(model.config))
    source, target = ForGpu(plain), (BECOMES | STAYS)[qtype]
    info, raw = source.find(NAME), source.tensor(NAME)
    assert info is not None
    assert (info.stored_type, info.resident_type, info.nbytes) == (qtype.name, target, raw.nbytes)
    assert (raw.qtype, raw.shape) == (target, info.shape)
    assert torch.equal(values_of(raw), plain.dense(NAME))
    layout = layout_of(model, EXPERTS)
    found, weights = source.find_experts(EXPERTS, layout), source.experts(EXPERTS, layout)
    own = plain.experts(EXPERTS, layout)
    assert found is not None
    for part in ("gate", "up", "down"):
        pairs = list(zip(getattr(weights, part), getattr(own, part), strict=True))
        assert all(torch.equal(values_of(ours), values_of(theirs)) for ours, theirs in pairs)
        assert {ours.qtype for ours, _ in pairs} == {getattr(found, part).resident_type}
        assert sum(ours.nbytes for ours, _ in pairs) == getattr(found, part).nbytes
    assert found.nbytes == found.gate.nbytes + found.up.nbytes + found.down.nbytes
    assert found.up.resident_type is target
