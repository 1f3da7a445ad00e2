"""Our engine against `transformers` eager in fp32: logits and greedy tokens, for named and for generic families.

Weights are random and stored as F32 safetensors, so both sides multiply the same numbers in fp32 and differ only in
the order of summation. Sums of K ~ 100 products of relative error 2^-24 each, a few layers deep, stay far below 1e-4
of the logits' scale; a wrong rotation, mask, router or expert order is off by 1e-2 and more.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.engines.one_sequence import StaticEngine
from tests.support.models.agreement import TOLERANCE, TYPES, engine_of, prompt
from tests.support.models.tiny_models import tiny_model, write_safetensors

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
