"""Operators take their places and everything is loaded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ktransformers.errors import TensorMismatchError
from ktransformers.operators.base import OperatorRuntime, Requirements
from ktransformers.optimize.apply import apply_plan, bind_plan, load_plan
from tests.support.engines.fake_operators import (
    EXPERTS_RULE,
    FakeExperts,
    FakeLinear,
    FakeSource,
    OwningBlock,
    meta_model,
    plan_with,
)


def test_nested_replacement_reaches_the_original_parent() -> None:
    model = meta_model("qwen3_moe")
    rules = (
        EXPERTS_RULE + "- {match: {name: 'mlp$'}, replace: {class: tests.support.engines.fake_operators.OwningBlock}}\n"
    )
    plan = plan_with(model, rules)
    block = model.model.layers[0].mlp
    apply_plan(model, plan)
    replaced = model.model.layers[0].mlp
    assert isinstance(replaced, OwningBlock)
    assert replaced is plan.operators["model.layers.0.mlp"]
    assert replaced.inner is block
    assert block.experts is plan.operators["model.layers.0.mlp.experts"]
    assert isinstance(block.experts, FakeExperts)


def test_operator_that_took_its_children_over() -> None:
    model = meta_model("llama")
    rules = (
        "- {match: {name: 'mlp$'}, replace: {class: tests.optimize.test_apply.TakesOver}}\n"
        "- {match: {name: 'up_proj$'}, replace: {class: tests.support.engines.fake_operators.FakeLinear}}\n"
    )
    plan = plan_with(model, rules)
    apply_plan(model, plan)
    block = model.model.layers[1].mlp
    assert block.up_proj is plan.operators["model.layers.1.mlp.up_proj"]
    assert isinstance(block.gate_proj, nn.Linear)


class TakesOver(OwningBlock):
    """Holds its module's children under their own names."""

    OWNED_CHILDREN = frozenset()

    def __init__(self, module: nn.Module, *args: object, **kwargs: object):
        super().__init__(module, *args, **kwargs)  # type: ignore[arg-type]
        for name, child in module.named_children():
            setattr(self, name, child)

    def requirements(self, source: object) -> Requirements:
        return Requirements()


def test_load_reads_every_tensor_once_in_tree_order() -> None:
    model = meta_model("glm4_moe")  # its routers hold a persistent buffer
    source = FakeSource(model)
    match = "{class: torch.nn.Linear, name: self_attn}"
    linear = f"- {{match: {match}, replace: {{class: tests.support.engines.fake_operators.FakeLinear}}}}\n"
    plan = plan_with(model, EXPERTS_RULE + linear, source)
    apply_plan(model, plan)
    seen: list[tuple[int, str]] = []
    load_plan(model, plan, source, lambda nbytes, key: seen.append((nbytes, key)))
    assert len(source.reads) == len(set(source.reads))
    biases = {f"model.layers.{i}.self_attn.{n}_proj.bias" for i in range(2) for n in "qkv"}  # FakeLinear skips them
    assert set(source.reads) == set(source.shapes) - biases
    assert [nbytes for nbytes, _ in seen] == sorted(nbytes for nbytes, _ in seen)
    assert seen[-1][0] == sum(plan.weight_bytes.values())
    assert [key for _, key in seen] == [entry.key for entry in plan.entries if entry.stored_names]
    gate = model.model.layers[1].mlp.gate
    value = float(len("model.layers.1.mlp.gate.e_score_correction_bias"))  # what FakeSource fills it with
    assert torch.equal(gate.e_score_correction_bias, torch.full((8,), value))
    assert isinstance(gate.weight, nn.Parameter)
    assert not gate.weight.requires_grad
    assert all(op.is_loaded for op in plan.operators.values() if isinstance(op, (FakeLinear, FakeExperts)))


def test_tied_parameters_are_one_tensor() -> None:
    model = meta_model("llama", tie_word_embeddings=True)
    source = FakeSource(model)
    plan = plan_with(model, "[]", source)
    apply_plan(model, plan)
    load_plan(model, plan, source)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert source.reads.count("model.embed_tokens.weight") == 1


def test_tied_operator_reads_the_other_name() -> None:
    model = meta_model("llama", tie_word_embeddings=True)
    source = FakeSource(model)
    rule = "- {match: {name: lm_head}, replace: {class: tests.support.engines.fake_operators.FakeLinear}}"
    plan = plan_with(model, rule, source)
    apply_plan(model, plan)
    load_plan(model, plan, source)
    assert source.reads.count("model.embed_tokens.weight") == 2


def test_a_tensor_that_vanished_since_planning() -> None:
    model = meta_model("llama")
    source = FakeSource(model)
    plan = plan_with(model, "[]", source)
    apply_plan(model, plan)
    del source.shapes["model.norm.weight"]
    with pytest.raises(TensorMismatchError, match=r"model\.norm\.weight"):
        load_plan(model, plan, source)


def test_an_operator_that_leaves_tensors_on_meta() -> None:
    model = meta_model("llama")
    source = FakeSource(model)
    plan = plan_with(
        model,
        "- {match: {name: 'norm$'}, replace: {class: tests.support.engines.fake_operators.UnloadedWrapper}}",
        source,
    )
    apply_plan(model, plan)
    with pytest.raises(TensorMismatchError, match=r"not loaded: model\.layers\.0\.input_layernorm\.inner\.weight"):
        load_plan(model, plan, source)


def test_owned_children_may_stay_on_meta() -> None:
    model = meta_model("qwen3_moe")
    source = FakeSource(model)
    rules = (
        EXPERTS_RULE + "- {match: {name: 'mlp$'}, replace: {class: tests.support.engines.fake_operators.OwningBlock}}\n"
    )
    plan = plan_with(model, rules, source)
    apply_plan(model, plan)
    load_plan(model, plan, source)
    assert model.model.layers[0].mlp.inner.gate.weight.is_meta


def test_an_operator_lives_through_its_stages_once_and_in_order() -> None:
    model = meta_model("llama")
    source = FakeSource(model)
    plan = plan_with(model, "- {match: {name: up_proj}, replace: {class: tests.optimize.test_apply.Attachable}}\n")
    key = "model.layers.0.mlp.up_proj"
    one = plan.operators[key]
    assert isinstance(one, Attachable)
    with pytest.raises(RuntimeError, match=rf"^{key} cannot become BOUND: it is PLANNED$"):
        bind_plan(plan, 8)
    apply_plan(model, plan)
    load_plan(model, plan, source)
    assert one.is_loaded
    with pytest.raises(RuntimeError, match=rf"^{key} cannot become LOADED: it is LOADED$"):
        one.fill(source)
    assert one.runtimes == []
    bind_plan(plan, 8)
    for again in (lambda: one.post_load(OperatorRuntime(9)), lambda: one.fill(source)):
        with pytest.raises(RuntimeError, match=r"it is BOUND$"):
            again()
    assert one.runtimes == [OperatorRuntime(8)]


class Attachable(FakeLinear):
    """Notes the sites that it was given."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.runtimes: list[OperatorRuntime] = []

    def bind(self, runtime: OperatorRuntime) -> None:
        self.runtimes.append(runtime)
