"""Runners of models from memory, by the default rules: no files, no engine."""

from __future__ import annotations

import copy

import torch

from benchmarks.sequence import SequenceRunner
from ktransformers.cache.static import StaticCache
from ktransformers.engine.model.skeleton import build_skeleton, restore_buffers
from ktransformers.engine.plan.cache_shapes import cache_shapes
from ktransformers.engine.plan.kv_types import KvTypes
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.models.facts import ModelFacts
from ktransformers.models.registry import default_optimize_rules
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.layers.cpu import fuse_layers
from ktransformers.operators.layers.native_stack import stack_cpu_layers
from ktransformers.operators.layers.traced import PROBE_ROWS, LayerCall, probe_logits, trace_step
from ktransformers.optimize.apply import apply_plan, load_plan
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.plan import make_plan
from ktransformers.optimize.rules import load_rules
from tests.support.checks.dict_source import DictSource


def runner_of(
    model: torch.nn.Module, max_len: int = 64, *, strict: bool = True, kv_type: str = "auto"
) -> SequenceRunner:
    state = dict(model.state_dict())
    skeleton = build_skeleton(copy.deepcopy(model.config))
    facts = ModelFacts.of(skeleton.config)
    pool, source = WorkerPool(1), DictSource(state)
    plan = make_plan(
        skeleton,
        load_rules(default_optimize_rules(facts, skeleton)),
        operator_config=OperatorConfig(facts, pool),
        source=source,
        machine=detect_machine(),
        strict=strict,
        ignorable=lambda name: name in plan_ties(skeleton),
    )
    operators = dict(plan.operators)
    shapes = KvTypes.of(kv_type, skeleton, operators).applied(cache_shapes(skeleton, facts, operators))
    apply_plan(skeleton, plan)
    restore_buffers(skeleton)
    load_plan(skeleton, plan, source)
    return SequenceRunner(
        ModelRunner(ForwardPass(skeleton, pool)), StaticCache(shapes, max_len), skeleton.config.vocab_size
    )


def plan_ties(model: torch.nn.Module) -> set[str]:
    return set(getattr(model, "all_tied_weights_keys", None) or {})


def random_ids(vocab_size: int, length: int, seed: int = 3) -> list[int]:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def calls_of(runner: SequenceRunner) -> list[LayerCall]:
    """The calls of its layers in a step of a few rows."""
    rows, shapes = torch.arange(PROBE_ROWS), list(runner.cache.shapes)
    ids = torch.zeros_like(rows)
    return trace_step(runner.model, lambda: probe_logits(runner.model, shapes, runner.pool, ids, rows, rows[-1:]))


def fused_runner(model: torch.nn.Module, kv_type: str = "auto", max_len: int = 64) -> SequenceRunner:
    runner = runner_of(model, max_len, kv_type=kv_type)
    fuse_layers(runner.model, list(runner.cache.shapes), runner.pool, calls_of(runner))
    return runner


def stacked_runner(model: torch.nn.Module, kv_type: str = "auto", max_len: int = 64) -> SequenceRunner:
    """Layers joined, the model's own forward around them."""
    runner = runner_of(model, max_len, kv_type=kv_type)
    shapes, calls = list(runner.cache.shapes), calls_of(runner)
    fuse_layers(runner.model, shapes, runner.pool, calls)
    stack_cpu_layers(runner.model, shapes, runner.pool, calls)
    return runner
