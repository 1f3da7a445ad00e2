"""The operators of each family, injected by the default rules, against the same model in `transformers` eager.

Weights come from memory, so only rules, operators, caches and kernels are under test. Both sides are fp32 and differ in
the order of summation alone; see tests/models/test_agreement.py for the tolerance.
"""

from __future__ import annotations

import copy

import pytest
import torch

from ktransformers.cache.static import StaticCache
from ktransformers.core import Phase
from ktransformers.engine.forward import ForwardPass
from ktransformers.engine.runner import StaticRunner
from ktransformers.engine.skeleton import build_skeleton, cache_shapes, restore_buffers
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.registry import default_rules
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.context import ForwardContext
from ktransformers.optimize.apply import apply_plan, load_plan
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.plan import make_plan
from ktransformers.optimize.rules import load_rules
from tests.support.dict_source import DictSource
from tests.support.tiny_models import tiny_model

FAMILIES = [
    "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "mixtral", "llama", "qwen3", "qwen2",
    "olmoe", "glm4_moe", "gpt_oss", "ernie4_5_moe", "granitemoe", "minimax_m2", "phimoe", "dots1",
    "hunyuan_v1_moe",
]  # fmt: skip
TOLERANCE = 1e-4


def runner_of(model: torch.nn.Module, max_len: int = 64) -> StaticRunner:
    state = dict(model.state_dict())
    skeleton = build_skeleton(copy.deepcopy(model.config))
    pool, source = WorkerPool(1), DictSource(state)
    plan = make_plan(
        skeleton,
        load_rules(default_rules(skeleton.config, skeleton)),
        operator_config=OperatorConfig(skeleton.config, pool),
        source=source,
        machine=detect_machine(),
        strict=True,
        ignorable=lambda name: name in plan_ties(skeleton),
    )
    shapes = cache_shapes(skeleton, dict(plan.operators))
    apply_plan(skeleton, plan)
    restore_buffers(skeleton)
    load_plan(skeleton, plan, source)
    return StaticRunner(ForwardPass(skeleton, pool), StaticCache(shapes, max_len), skeleton.config.vocab_size)


def plan_ties(model: torch.nn.Module) -> set[str]:
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def random_ids(vocab_size: int, length: int, seed: int = 3) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_agree_with_transformers(model_type: str) -> None:
    model = tiny_model(model_type, seed=1)
    runner = runner_of(model)
    ids = random_ids(model.config.vocab_size, 24)
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    got = runner.forward(ids, 0, range(len(ids)))
    assert (got - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("model_type", FAMILIES)
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
    packed = runner.step(torch.tensor(first + second), positions, context, torch.arange(sum(lengths)))
    assert torch.equal(packed, torch.cat(alone))
