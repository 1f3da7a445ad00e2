"""Our engine against `transformers` eager in fp32: logits and greedy tokens, for named and for generic families.

Weights are random and stored as F32 safetensors, so both sides multiply the same numbers in fp32 and differ only in
the order of summation. Sums of K ~ 100 products of relative error 2^-24 each, a few layers deep, stay far below 1e-4
of the logits' scale; a wrong rotation, mask, router or expert order is off by 1e-2 and more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.engines.one_sequence import StaticEngine
from tests.support.models.agreement import TOLERANCE, TYPES, engine_of, logits_of, prompt
from tests.support.models.family_models import family_config
from tests.support.models.tiny_models import random_model, tiny_model, write_safetensors

ANSWER_LEN = 16


def greedy(engine: StaticEngine, ids: list[int], steps: int) -> list[int]:
    logits = engine.runner.forward(ids, 0, [len(ids) - 1])
    tokens = [int(logits[0].argmax())]
    for i in range(steps - 1):
        tokens.append(int(engine.runner.forward([tokens[-1]], len(ids) + i, [0])[0].argmax()))
    return tokens


@pytest.mark.every(5)
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_and_tokens_agree_with_transformers(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=1)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    engine = engine_of(tmp_path)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = engine.runner.forward(ids, 0, range(len(ids)))
    assert got.shape == want.shape
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()

    model.generation_config.eos_token_id = None  # random models end anywhere
    expected = model.generate(torch.tensor([ids]), max_new_tokens=ANSWER_LEN, do_sample=False, pad_token_id=0)
    assert greedy(engine, ids, ANSWER_LEN) == expected[0, len(ids) :].tolist()


@pytest.mark.every(5)
@pytest.mark.parametrize("model_type", TYPES)
def test_logits_do_not_depend_on_chunks(model_type: str, tmp_path: Path) -> None:
    model = tiny_model(model_type, seed=2)
    ids = prompt(model.config.vocab_size)
    write_safetensors(model, tmp_path)
    engine = engine_of(tmp_path)
    whole = engine.runner.forward(ids, 0, range(len(ids)))
    for size in (1, 7, 16):
        parts = [
            engine.runner.forward(ids[at : at + size], at, range(len(ids[at : at + size])))
            for at in range(0, len(ids), size)
        ]
        assert torch.equal(torch.cat(parts), whole), f"chunks of {size}"


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # of torch
@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "hy_v4"])
def test_shared_experts_may_be_none(model_type: str, tmp_path: Path) -> None:
    """Their matrices have no columns, or no rows, then."""
    config: Any = family_config(model_type)
    config.n_shared_experts = 0
    model = random_model(config, 1)
    ids = prompt(config.vocab_size)
    got = engine_of(write_safetensors(model, tmp_path)).runner.forward(ids, 0, range(len(ids)))
    want = logits_of(model, ids)
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()
