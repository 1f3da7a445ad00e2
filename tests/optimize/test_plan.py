"""Plans: which rule decides, placement, bytes, warnings, mismatches, fit."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from torch import nn

from ktransformers.errors import CapacityError, RuleError, TensorMismatchError, UnsupportedError
from ktransformers.operators.base import Placement
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan, PlanEntry, format_bytes
from tests.support.engines.fake_operators import EXPERTS_RULE, GIB, MACHINE, FakeSource, meta_model, plan_with

LINEAR = "{class: tests.support.engines.fake_operators.FakeLinear}"
TWO_GPUS = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, "cuda:0": GIB, "cuda:1": GIB})


def entry_of(plan: Plan, key: str) -> PlanEntry:
    (found,) = [entry for entry in plan.entries if entry.key == key]
    return found


def test_first_matching_rule_decides_and_others_stay() -> None:
    model = meta_model("llama")
    plan = plan_with(
        model,
        rf"""
- match: {{name: 'layers\.0\.self_attn\.q_proj', class: torch.nn.Linear}}
  replace: {{class: tests.support.engines.fake_operators.FakeLinear, kwargs: {{bits: 4, generate_op: FastOp}}}}
- match: {{class: torch.nn.Linear}}
  replace: {LINEAR}
""",
    )
    first, second = (entry_of(plan, f"model.layers.{i}.self_attn.q_proj") for i in (0, 1))
    assert (first.rule, first.generate_op, first.prefill_op) == (1, "FastOp", "FakeLinear")
    assert (second.rule, second.generate_op) == (2, "FakeLinear")
    assert plan.operators[first.key].bits == 4
    assert first.nbytes == {"cpu": 4 * 64 * 64}
    embedding = entry_of(plan, "model.embed_tokens")
    assert embedding.is_kept
    assert (embedding.rule, embedding.generate_op, embedding.hf_class) == (None, "torch", "Embedding")
    assert embedding.quant_types == ("F32",)
    assert [entry.key for entry in plan.entries] == [name for name, _ in model.named_modules()]
    assert plan.unmatched == ()


def test_totals_are_the_bytes_of_the_checkpoint() -> None:
    model = meta_model("qwen2_moe")
    plan = plan_with(model, EXPERTS_RULE, extra_bytes={"kv cache": {"cpu": 100}})
    nbytes = sum(4 * p.numel() for p in model.parameters())
    assert plan.weight_bytes == {"cpu": nbytes}
    assert plan.total_bytes == {"cpu": nbytes + 100}
    assert all(p.is_meta for p in model.parameters())  # planning changed nothing
    assert not any(type(m).__module__ == "tests.support.engines.fake_operators" for m in model.modules())


def test_recursive_false_keeps_what_is_inside() -> None:
    plan = plan_with(
        meta_model("llama"),
        rf"""
- match: {{name: 'layers\.0\.mlp$'}}
  replace: {{class: default, kwargs: {{generate_device: cuda:1}}}}
  recursive: false
- match: {{class: torch.nn.Linear}}
  replace: {LINEAR}
""",
        machine=TWO_GPUS,
    )
    inside = entry_of(plan, "model.layers.0.mlp.up_proj")
    assert inside.is_kept
    assert inside.rule == 1
    assert list(inside.nbytes) == ["cuda:1"]
    assert entry_of(plan, "model.layers.1.mlp.up_proj").operator == "FakeLinear"


def test_owned_children_are_not_visited() -> None:
    plan = plan_with(
        meta_model("qwen3_moe"),
        EXPERTS_RULE
        + "- {match: {name: 'mlp$'}, replace: {class: tests.support.engines.fake_operators.OwningBlock}}\n",
    )
    keys = [entry.key for entry in plan.entries]
    assert "model.layers.0.mlp" in keys
    assert "model.layers.0.mlp.gate" not in keys
    assert entry_of(plan, "model.layers.0.mlp").stored_names == {"model.layers.0.mlp.gate.weight"}


KWARGS = {
    "{}": Placement("cuda:0", "cuda:0", "cuda:0"),
    "{generate_device: cpu}": Placement("cpu", "cpu", "cpu"),
    "{generate_device: cpu, prefill_device: cuda, out_device: cuda:1}": Placement("cpu", "cuda:0", "cuda:1"),
    "{prefill_device: cuda:1}": Placement("cuda:1", "cuda:1", "cuda:1"),
    "{generate_op: SlowOp, prefill_op: None}": Placement("cuda:0", "cuda:0", "cuda:0", "SlowOp", None),
}


@pytest.mark.parametrize(("kwargs", "expected"), KWARGS.items())
def test_placement(kwargs: str, expected: Placement) -> None:
    operator = "tests.support.engines.fake_operators.FakeLinear"
    rule = f"- match: {{name: lm_head}}\n  replace: {{class: {operator}, kwargs: {kwargs}}}\n"
    assert entry_of(plan_with(meta_model("llama"), rule, machine=TWO_GPUS), "lm_head").placement == expected


def test_cuda_without_cuda_is_cpu_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    rule = f"- match: {{class: torch.nn.Linear}}\n  replace: {LINEAR[:-1]}, kwargs: {{generate_device: 'cuda:3'}}}}\n"
    with caplog.at_level(logging.INFO):
        plan = plan_with(meta_model("llama"), rule)
        plan.report_fallback()
    assert entry_of(plan, "lm_head").placement == Placement("cpu", "cpu", "cpu")
    (line,) = [r.getMessage() for r in caplog.records if "no CUDA device" in r.getMessage()]
    assert line.startswith("<rules> places 15 modules on cuda; ")


def test_a_gpu_that_is_not_there_is_an_error() -> None:
    rule = f"- match: {{name: lm_head}}\n  replace: {LINEAR[:-1]}, kwargs: {{generate_device: 'cuda:3'}}}}\n"
    with pytest.raises(RuleError, match="there is no cuda:3 here; this machine has cpu, cuda:0, cuda:1"):
        plan_with(meta_model("llama"), rule, machine=TWO_GPUS)


UNMATCHED = {
    "- {match: {name: nothing}, replace: {}}": "matches nothing (name 'nothing')",
    "- {match: {class: torch.nn.Conv1d}, replace: {}}": "matches nothing (class torch.nn.modules.conv.Conv1d)",
    "- {match: {name: lm_haed, class: torch.nn.Linear}, replace: {}}": "modules of that class are called",
    "- {match: {name: lm_head, class: torch.nn.Conv1d}, replace: {}}": "modules of that name are Linear and the like",
    "- {match: {name: norm}, replace: {}}\n- {match: {name: norm$}, replace: {}}": "rule 1 above comes first",
    "- {match: {name: mlp$}, replace: {}, recursive: false}\n- {match: {name: mlp.up}, replace: {}}": "rule 1 above",
}


@pytest.mark.parametrize(("rules", "words"), UNMATCHED.items())
def test_a_rule_that_decides_nothing(rules: str, words: str, caplog: pytest.LogCaptureFixture) -> None:
    model = meta_model("llama")
    plan = plan_with(model, rules)
    (unmatched,) = plan.unmatched
    assert words in unmatched.message
    assert unmatched.rule == rules.count("\n") + 1
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert words in record.getMessage()
    assert f"<rules>:{unmatched.line} (rule {unmatched.rule})" in record.getMessage()
    with pytest.raises(RuleError, match="--strict"):
        plan_with(model, rules, strict=True)


def test_a_rule_for_an_owned_child_decides_nothing() -> None:
    plan = plan_with(
        meta_model("qwen3_moe"),
        EXPERTS_RULE
        + "- {match: {name: 'mlp$'}, replace: {class: tests.support.engines.fake_operators.OwningBlock}}\n"
        + "- {match: {name: 'mlp.gate$'}, replace: {}}\n",
    )
    (unmatched,) = plan.unmatched
    assert unmatched.message == "decides nothing: 'model.layers.0.mlp.gate' belongs to the operator around it"


def test_experts_need_an_operator() -> None:
    with pytest.raises(RuleError, match=r"no rule replaces the routed experts model\.layers\.0\.mlp\.experts"):
        plan_with(meta_model("qwen3_moe"), "[]")


HIDDEN_EXPERTS = r"""
- match: {name: '^model\.norm$'}
  replace: {class: default}
- match: {name: '^model\.layers\.\d+\.mlp'}
  replace: {class: default}
  recursive: %s
- match: {name: 'mlp\.experts$'}
  replace: {class: tests.support.engines.fake_operators.FakeExperts}
"""


@pytest.mark.parametrize("recursive", ["true", "false"])
def test_the_rule_that_hides_the_experts_rule_is_named(recursive: str) -> None:
    with pytest.raises(
        RuleError,
        match=r"(?s):4 \(rule 2\).*keeps the routed experts model\.layers\.0\.mlp\.experts.*hides rule 3 \(line 7\)",
    ):
        plan_with(meta_model("qwen3_moe"), HIDDEN_EXPERTS % recursive)


def test_a_rule_that_keeps_experts_is_named() -> None:
    with pytest.raises(RuleError, match=r":1 \(rule 1\).*keeps the routed experts .*KTransformersExperts"):
        plan_with(meta_model("qwen3_moe"), "- {match: {name: experts}, replace: {class: default}}")


def test_the_root_stays() -> None:
    with pytest.raises(RuleError, match="matches the whole model"):
        plan_with(meta_model("llama"), f"- match: {{name: '^$'}}\n  replace: {LINEAR}\n")


def test_an_operator_that_refuses_is_reported_with_its_rule() -> None:
    rule = "\n- match: {name: embed_tokens}\n  replace: {class: ktransformers.operators.linear.KTransformersLinear}\n"
    with pytest.raises(RuleError) as caught:
        plan_with(meta_model("llama"), rule)
    assert (caught.value.line, caught.value.rule) == (2, 1)
    assert "KTransformersLinear at model.embed_tokens" in str(caught.value)


def break_missing(source: FakeSource) -> None:
    for i in range(2):
        del source.shapes[f"model.layers.{i}.mlp.up_proj.weight"]


def break_shape(source: FakeSource) -> None:
    source.shapes["model.norm.weight"] = (63,)


def break_left_over(source: FakeSource) -> None:
    source.shapes.update({f"model.layers.{i}.mlp.extra.weight": (1,) for i in range(7)})


def break_uncounted(source: FakeSource) -> None:
    source.shapes.update({f"model.layers.{i}.eh_proj.weight": (1,) for i in (1, 2, 3)})


MISMATCHES: dict[Callable[[FakeSource], None], list[str]] = {
    break_missing: [
        "2 tensors are missing or",
        "model.layers.0.mlp.up_proj.weight",
        "layers.1.mlp.up_proj",
    ],
    break_shape: ["model.norm.weight has shape (63,)", "(64,)"],
    break_uncounted: [
        "3 tensors are read by no module: ",
        "2 of them are of layers behind layer 1, where the model's config counts none for multi-token prediction: "
        "its field for their number is missing, null or 0",
    ],
    break_left_over: ["7 tensors are read by no module: ", "model.layers.2.mlp.extra.weight", "and 4 more"],
}


@pytest.mark.parametrize(("spoil", "words"), MISMATCHES.items())
def test_mismatches_name_the_tensors(spoil: Callable[[FakeSource], None], words: list[str]) -> None:
    model = meta_model("llama")
    source = FakeSource(model)
    spoil(source)
    with pytest.raises(TensorMismatchError) as caught:
        plan_with(model, "[]", source)
    for word in words:
        assert word in str(caught.value)


def test_ignorable_tensors_may_be_left() -> None:
    model = meta_model("llama")
    source = FakeSource(model)
    break_left_over(source)
    plan_with(model, "[]", source, ignorable=lambda name: ".extra." in name)


BOTH = "- {match: {name: 'embed_tokens|lm_head'}, replace: {class: tests.support.engines.fake_operators.FakeLinear}}"
HEAD = "- {match: {name: lm_head}, replace: {class: tests.support.engines.fake_operators.FakeLinear}}"
TABLE_BYTES = 4 * 160 * 64


@pytest.mark.parametrize(
    ("rules", "stored_type", "head_bytes"),
    [("[]", "F32", {}), (BOTH, "F32", {}), (BOTH, "Q3_K", {"cpu": TABLE_BYTES}), (HEAD, "F32", {"cpu": TABLE_BYTES})],
)
def test_tied_weights_count_once_where_memory_is_shared(
    rules: str, stored_type: str, head_bytes: dict[str, int]
) -> None:
    model = meta_model("llama", tie_word_embeddings=True)
    source = FakeSource(model)
    source.stored_type = stored_type
    assert "lm_head.weight" not in source.shapes
    plan = plan_with(model, rules, source)
    assert entry_of(plan, "model.embed_tokens").nbytes == {"cpu": TABLE_BYTES}
    assert entry_of(plan, "lm_head").nbytes == head_bytes
    assert entry_of(plan, "lm_head").note == ("" if head_bytes else "shares model.embed_tokens")


def test_a_tied_module_still_counts_its_own_bias() -> None:
    plan = plan_with(meta_model("phimoe", tie_word_embeddings=True), EXPERTS_RULE)  # its lm_head has a bias
    head = entry_of(plan, "lm_head")
    assert head.nbytes == {"cpu": 4 * 160}
    assert head.note == "shares model.embed_tokens"


def test_untied_weights_are_needed() -> None:
    model = meta_model("llama", tie_word_embeddings=False)
    source = FakeSource(model)
    del source.shapes["lm_head.weight"]
    with pytest.raises(TensorMismatchError, match=r"lm_head\.weight is missing"):
        plan_with(model, "[]", source)


def test_a_module_in_two_places() -> None:
    model = meta_model("llama")
    model.model.layers[1].mlp = model.model.layers[0].mlp
    with pytest.raises(UnsupportedError, match="are one module"):
        plan_with(model, "[]")


def test_fit() -> None:
    model = meta_model("llama")
    nbytes = sum(4 * p.numel() for p in model.parameters())
    exact = Machine(nbytes + 100, nbytes + 100, {"cpu": nbytes + 100})
    fits = plan_with(model, "[]", machine=exact, extra_bytes={"kv cache": {"cpu": 100}})
    assert fits.misfit() is None
    fits.check_fits()
    plan = plan_with(model, "[]", machine=exact, extra_bytes={"kv cache": {"cpu": 101}})
    with pytest.raises(CapacityError, match=r"cpu: weights .* \+ kv cache 101 B = .*, but .* are free"):
        plan.check_fits()


def test_a_device_that_is_not_there_has_no_room() -> None:
    plan = plan_with(meta_model("llama"), "[]", extra_bytes={"kv cache": {"cuda:0": 1}})
    with pytest.raises(CapacityError, match="cuda:0: kv cache 1 B = 1 B, but 0 B are free"):
        plan.check_fits()


def test_machine_of_the_tests_has_a_cpu() -> None:
    assert MACHINE.default_device == "cpu"
    assert TWO_GPUS.default_device == "cuda:0"


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (5 << 20, "5.00 MiB"), (3 << 30, "3.00 GiB")],
)
def test_format_bytes(nbytes: int, shown: str) -> None:
    assert format_bytes(nbytes) == shown


def test_named_module_of_torch_is_planned_too() -> None:
    plan = plan_with(meta_model("phimoe"), EXPERTS_RULE)
    norm = entry_of(plan, "model.norm")
    assert norm.hf_class == nn.LayerNorm.__name__
    assert norm.stored_names == {"model.norm.weight", "model.norm.bias"}
