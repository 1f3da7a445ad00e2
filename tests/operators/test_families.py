"""The operators of each family, injected by the default rules, against the same model in `transformers` eager.

Weights come from memory, so only rules, operators, caches and kernels are under test. Both sides are fp32 and differ in
the order of summation alone; see tests/models/test_agreement.py for the tolerance.
"""

from __future__ import annotations

import pytest
import torch

from ktransformers.core import Phase
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.operators.context import ForwardContext
from tests.support.engines.runners import random_ids, runner_of
from tests.support.models.agreement import TOLERANCE, TYPES
from tests.support.models.tiny_models import tiny_model


@pytest.mark.parametrize("model_type", TYPES)
def test_logits_agree_with_transformers(model_type: str) -> None:
    model = tiny_model(model_type, seed=1)
    runner = runner_of(model)
    ids = random_ids(model.config.vocab_size, 24)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("model_type", TYPES)
def test_two_packed_sequences_equal_each_alone(model_type: str) -> None:
    """The rows of one step may belong to several sequences: bit-identical to each sequence by itself."""
    model = tiny_model(model_type, seed=2)
    runner = runner_of(model)
    first, second = random_ids(model.config.vocab_size, 9, 4), random_ids(model.config.vocab_size, 13, 5)
    alone = [runner.forward(ids, 0, range(len(ids))) for ids in (first, second)]

    page = 16  # two sequences in pages 0 and 1 of the same cache
    lengths = [len(first), len(second)]
    positions = torch.cat([torch.arange(n) for n in lengths])
    sequence = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
    context = ForwardContext(
        cache=runner.cache,
        pool=runner.pool,
        phase=Phase.PREFILL,
        page_size=page,
        slot_mapping=sequence * page + positions,
        seq_ids=sequence.to(torch.int32),
        kv_lens=(positions + 1).to(torch.int32),
        block_table=torch.tensor([[0], [1]], dtype=torch.int32),
    )
    ids = torch.tensor(first + second)
    packed = runner.steps.step(ForwardBatch(ids, positions, context, torch.arange(sum(lengths))))
    assert torch.equal(packed, torch.cat(alone))
