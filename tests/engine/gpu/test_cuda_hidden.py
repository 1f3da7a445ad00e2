"""Embeddings on a real GPU, in bf16, against `transformers` in fp32 on the same weights; why 5 %: see test_cuda.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ktransformers.core import Pooling, SamplingParams
from ktransformers.kernels.types import QuantType
from tests.support.engines.cuda_engines import TOLERANCE, check, engine_of
from tests.support.engines.gpu_engines import logits_in_steps
from tests.support.engines.sequential import Session
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import dequantized, prompt
from tests.support.models.tiny_models import tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def _pooled(hidden_states: torch.Tensor, pooling: Pooling) -> np.ndarray:
    rows = hidden_states.double().numpy()
    return {Pooling.FIRST: rows[0], Pooling.LAST: rows[-1], Pooling.MEAN: rows.mean(0)}[pooling]


@pytest.mark.parametrize("chunk_size", [8, 64], ids=["chunks", "whole"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "deepseek_v3"])
def test_embeddings_are_those_of_transformers(model_type: str, chunk_size: int, tmp_path: Path) -> None:
    """Of prompts that are one chunk, several, and so short that other steps of their size are replayed from graphs.

    Logits afterwards are right, too: the graphs do not see that steps in between were watched.
    """
    model, kind = tiny_model(model_type, seed=3, hidden=256), QuantType.Q8_0
    path = write_gguf(model, tmp_path / "model.gguf", kind, kind, kv_b="whole")
    reference = dequantized(model, kind, kind)
    engine, ids = engine_of(path, on_gpu=True, chunk_size=chunk_size), prompt(model.config.vocab_size)
    session = Session.of(engine)
    assert len(list(session.generate(ids, PARAMS))) == PARAMS.max_tokens
    for length in (1, 3, len(ids)):
        with torch.no_grad():
            hidden_states = reference.model(torch.tensor([ids[:length]])).last_hidden_state[0]
        for pooling in Pooling:
            params = SamplingParams(temperature=0, max_tokens=1, pooling=pooling)
            (event,) = session.generate(ids[:length], params)
            assert event.embedding is not None
            got, want = np.frombuffer(event.embedding, "<f4"), _pooled(hidden_states, pooling)
            assert np.linalg.norm(got - want) <= TOLERANCE * np.linalg.norm(want), (length, pooling)
    with torch.no_grad():
        want_logits = reference(torch.tensor([ids])).logits[0]
    check(logits_in_steps(engine, ids), want_logits)
