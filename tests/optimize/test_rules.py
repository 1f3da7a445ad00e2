"""Rule files: what is accepted, and errors that carry file, line and rule."""

from __future__ import annotations

import logging
import random
from pathlib import Path

import pytest
from torch import nn

from ktransformers.errors import RuleError
from ktransformers.optimize.rules import Rule, load_rules, parse_rules
from tests.support.engines.fake_operators import FakeLinear

FAKE = "tests.support.engines.fake_operators.FakeLinear"


def one(text: str) -> Rule:
    (rule,) = parse_rules(text, "f.yaml", trust=True).rules
    return rule


def with_kwargs(kwargs: str, operator: str = FAKE) -> str:
    return f"- match:\n    class: torch.nn.Linear\n  replace:\n    class: {operator}\n    kwargs:\n      {kwargs}\n"


def test_a_whole_rule() -> None:
    rule = one(
        "# comment\n"
        "- match:\n"
        "    name: '^model\\.layers\\.'\n"
        "    class: torch.nn.Linear\n"
        "  replace:\n"
        f"    class: {FAKE}\n"
        "    kwargs: {generate_device: cuda:1, prefill_device: cpu, generate_op: FastOp, prefill_op: 'None', bits: 4}\n"
        "  recursive: False\n"
    )
    assert (rule.number, rule.line, rule.file) == (1, 2, "f.yaml")
    assert rule.name is not None
    assert rule.name.pattern == r"^model\.layers\."
    assert rule.match_class is nn.Linear
    assert rule.operator is FakeLinear
    assert rule.devices == {"generate_device": "cuda:1", "prefill_device": "cpu"}
    assert rule.ops == {"generate_op": "FastOp"}
    assert rule.kwargs == {"bits": 4}
    assert not rule.recursive


@pytest.mark.parametrize("replace", ["{}", "{class: default}", "{class: 'default', kwargs: {generate_device: cpu}}"])
def test_default_keeps_the_module(replace: str) -> None:
    rule = one(f"- match: {{name: x}}\n  replace: {replace}\n")
    assert rule.operator is None
    assert rule.recursive


@pytest.mark.parametrize("none", ["None", "'None'", "null", "~"])
def test_none_is_no_op(none: str) -> None:
    assert one(with_kwargs(f"generate_op: {none}")).ops == {}


def test_own_name_is_an_op() -> None:
    assert one(with_kwargs("generate_op: FakeLinear")).ops == {"generate_op": "FakeLinear"}


def test_transfer_map_keys_are_numbers() -> None:
    rule = one(with_kwargs("transfer_map: {30: 'cuda:1', '45': cpu}"))
    assert rule.kwargs == {"transfer_map": {30: "cuda:1", 45: "cpu"}}


def test_empty_list_is_no_rules() -> None:
    assert parse_rules("[]").rules == ()


def test_matching_is_a_search_and_both_conditions_hold() -> None:
    linear, norm = nn.Linear(1, 1), nn.LayerNorm(1)
    rule = one("- {match: {name: 'self_attn', class: torch.nn.Linear}, replace: {}}")
    assert rule.matches("model.layers.0.self_attn.q_proj", linear, "llama")
    assert not rule.matches("model.layers.0.self_attn.q_proj", norm, "llama")
    assert not rule.matches("model.layers.0.mlp.up_proj", linear, "llama")
    root = one("- {match: {name: '^$'}, replace: {}}")
    assert root.matches("", norm, "llama")
    ahead = one(r"- {match: {name: '^model\.layers\.(?!.*self_attn\.kv_b_proj).*$'}, replace: {}}")
    assert ahead.matches("model.layers.0.self_attn.q_proj", linear, "llama")
    assert not ahead.matches("model.layers.0.self_attn.kv_b_proj", linear, "llama")


def test_subclasses_match() -> None:
    class Special(nn.Linear):
        pass

    assert one("- {match: {class: torch.nn.Linear}, replace: {}}").matches("x", Special(1, 1), "llama")


GOOD = "- match: {name: a}\n  replace: {class: default}\n"


@pytest.mark.parametrize(
    ("text", "line", "rule", "words"),
    [
        ("", None, None, "holds no rules"),
        ("match: {name: a}\n", 1, None, "must be a list of rules"),
        (GOOD + "- 3\n", 3, 2, "a rule must be a mapping"),
        (GOOD + "- replace: {}\n", 3, 2, "needs the key 'match'"),
        (GOOD + "- match: {name: a}\n", 3, 2, "needs the key 'replace'"),
        (GOOD + "- match: {name: a}\n  replcae: {}\n", 4, 2, "unknown key 'replcae' in a rule; did you mean replace?"),
        (GOOD + "- match: {nmae: a}\n  replace: {}\n", 3, 2, "did you mean name?"),
        (GOOD + "- match: {}\n  replace: {}\n", 3, 2, "match needs a name, a class, or both"),
        (GOOD + "- match:\n    name: 3\n  replace: {}\n", 4, 2, "match.name must be text, not a number"),
        (GOOD + "- match:\n    name: '('\n  replace: {}\n", 4, 2, "not a regular expression"),
        (GOOD + "- match:\n    class: torch.nn.Liner\n  replace: {}\n", 4, 2, "did you mean torch.nn.Linear?"),
        (GOOD + "- match: {name: a}\n  replace:\n    klass: x\n", 5, 2, "did you mean class?"),
        (GOOD + "- match: {name: a}\n  replace:\n    class: 3\n", 5, 2, "replace.class must be a dotted name"),
        (GOOD + "- match: {name: a}\n  replace: {}\n  recursive: 1\n", 5, 2, "recursive must be true or false"),
        (GOOD + "- match: {name: a}\n  replace: {kwargs: [1]}\n", 4, 2, "kwargs must be a mapping"),
        (GOOD + GOOD.replace("default", "torch.nn.Linear"), 4, 2, "not a subclass of"),
        (with_kwargs("bitz: 4"), 6, 1, "unknown key 'bitz' in kwargs; did you mean bits?"),
        (with_kwargs("prefil_device: cpu"), 6, 1, "did you mean prefill_device?"),
        (with_kwargs("generate_device: gpu"), 6, 1, "generate_device must be cpu, cuda or cuda:N, got 'gpu'"),
        (with_kwargs("generate_device: 'npu:0'"), 6, 1, "Ascend"),
        (with_kwargs("generate_device: xpu"), 6, 1, "Intel XPUs: hardware that ktransformers does not drive"),
        (with_kwargs("prefill_device: 'xpu:1'"), 6, 1, "Intel XPUs: hardware that ktransformers does not drive"),
        (with_kwargs("out_device: [cpu]"), 6, 1, "out_device must be"),
        (with_kwargs("generate_op: FastOpp"), 6, 1, "has no op 'FastOpp'; did you mean FastOp?"),
        (with_kwargs("generate_op: KLinearIPEXLLM"), 6, 1, "IPEX, hardware that ktransformers does not drive"),
        (with_kwargs("generate_op: 3"), 6, 1, "has no op 3"),
        (with_kwargs("generate_op: FastOp", "default"), 6, 1, "needs an operator"),
        (
            with_kwargs("prefill_op: X", "tests.support.engines.fake_operators.FakeExperts"),
            6,
            1,
            "has one implementation",
        ),
        (with_kwargs("transfer_map: {a: cpu}"), 6, 1, "'a' is not a layer number"),
        (with_kwargs("transfer_map: {1: cpu, '1': cpu}"), 6, 1, "stands there twice"),
        (with_kwargs("transfer_map: {1: gpu}"), 6, 1, "transfer_map must be cpu, cuda or cuda:N"),
        (with_kwargs("transfer_map: cpu"), 6, 1, "transfer_map must map layer numbers"),
        (with_kwargs("act_order: 3"), 6, 1, "act_order must be true or false"),
        (with_kwargs("backend: AMX"), 6, 1, "backend must be llamafile, AMXBF16, AMXInt8 or AMXInt4"),
        (with_kwargs("bits: 4\n      bits: 5"), 7, 1, "stands here twice"),
    ],
)
def test_errors_point_at_the_place(text: str, line: int | None, rule: int | None, words: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_rules(text, "f.yaml", trust=True)
    assert words in str(caught.value)
    assert (caught.value.file, caught.value.line, caught.value.rule) == ("f.yaml", line, rule)


def test_known_kwargs_without_effect_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        rules = parse_rules(with_kwargs("{act_order: true, group_size: -1}") * 3, "f.yaml", trust=True).rules
    assert [rule.kwargs for rule in rules] == [{}, {}, {}]
    assert len([r for r in caplog.records if "act_order has no effect on FakeLinear" in r.getMessage()]) == 1
    assert len([r for r in caplog.records if "group_size has no effect on FakeLinear" in r.getMessage()]) == 1
    assert len(caplog.records) == 2


FIRST_RELEASE = """
- match:
    name: "^model\\\\.layers\\\\..*$"
    class: torch.nn.Linear
  replace:
    class: ktransformers.operators.linear.KTransformerLinear
    device: "cpu"
    kwargs:
      generate_device: "cuda"
      generate_linear_type: "QuantizedLinearMarlin"
      prefill_linear_type: "QuantizedLinearTorch"
- match:
    name: "^model\\\\.layers\\\\..*\\\\.mlp\\\\.experts$"
  replace:
    class: ktransformers.operators.experts.KTransformersMLPExpert
    device: "cpu"
    kwargs:
      prefill_mlp_type: "MLPExpertsTorch"
      generate_mlp_type: "MLPCPUExperts"
  recursive: False
"""


def test_words_of_the_first_release(caplog: pytest.LogCaptureFixture) -> None:
    """As in upstream's first README and rule files."""
    with caplog.at_level(logging.INFO):
        linear, experts = parse_rules(FIRST_RELEASE, "old.yaml").rules
    assert linear.operator is not None
    assert linear.operator.__name__ == "KTransformersLinear"
    assert linear.ops == {"generate_op": "KLinearMarlin", "prefill_op": "KLinearTorch"}
    assert linear.devices == {"generate_device": "cuda"}
    assert experts.operator is not None
    assert experts.operator.__name__ == "KTransformersExperts"
    assert experts.ops == {"generate_op": "KExpertsCPU", "prefill_op": "KExpertsTorch"}
    (record,) = caplog.records
    assert "old.yaml: replace.device has no effect" in record.getMessage()


def test_both_spellings_of_a_kwarg_are_one_too_many() -> None:
    text = with_kwargs("{generate_op: FastOp, generate_linear_type: FastOp}")
    with pytest.raises(RuleError, match="generate_linear_type and generate_op mean the same"):
        parse_rules(text, "f.yaml", trust=True)


OPERATORS = "ktransformers.operators."


@pytest.mark.parametrize(
    ("operator", "kwargs", "said"),
    [
        ("experts.KTransformersExpertsV2", "backend: AMXInt8", "backend has no effect on KTransformersExperts"),
        ("experts.KTransformersExpertsV2", "backend: AMXInt4", "backend has no effect on KTransformersExperts"),
        ("experts.KTransformersExpertsV2", "n_deferred_experts: [6, 8]", "n_deferred_experts has no effect on"),
        ("experts.KTransformersExpertsV2", "n_deferred_experts: 6", "n_deferred_experts has no effect on"),
        ("attention.KLlamaAttention", "chunck_size: 1000", "chunck_size has no effect on KAttention"),
        ("attention.KLlamaAttention", "absorb_for_prefill: true", "absorb_for_prefill has no effect on KAttention"),
        ("attention.KDeepseekV2Attention", "chunck_size: 1000", "chunck_size has no effect on KMLAAttention"),
    ],
)
def test_what_is_accepted_and_changes_nothing_is_said(
    operator: str, kwargs: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        rules = parse_rules(with_kwargs(kwargs, OPERATORS + operator) * 2, "f.yaml").rules
    assert [rule.kwargs for rule in rules] == [{}, {}]
    (record,) = caplog.records
    assert f"f.yaml: {said}" in record.getMessage()


def test_load_rules_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD + "- {}\n")
    with pytest.raises(RuleError, match=r"mine\.yaml:3 \(rule 2\)"):
        load_rules(path)


def test_a_doubtful_regular_expression_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    one("- match: {name: '[[a]'}\n  replace: {}\n")
    (record,) = caplog.records
    assert "f.yaml:1 (rule 1): match.name '[[a]': Possible nested set" in record.getMessage()


def test_mutated_files_are_rules_or_rule_errors() -> None:
    rng = random.Random(0)
    text = (
        "- match: {name: '^model\\.(?!x)[a-c]', class: torch.nn.Linear}\n"
        "  replace:\n"
        f"    class: {FAKE}\n"
        "    kwargs: &k {generate_device: 'cuda:1', generate_op: FastOp, bits: 4, transfer_map: {3: cpu}}\n"
        "  recursive: False\n"
        "- {match: {name: a}, replace: {class: default, kwargs: {out_device: cpu}}}\n"
    )
    outcomes = set()
    for _ in range(400):
        mutated = list(text)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(mutated))
            mutated[at : at + rng.randint(0, 3)] = rng.choice(
                ["", "\n", "  ", "*k", "&k ", "[", "}", ":", "'", "!!int ", "\0"]
            )
        try:
            outcomes.add(type(parse_rules("".join(mutated), "f.yaml", trust=True)).__name__)
        except RuleError as error:
            assert error.file == "f.yaml"  # noqa: PT017 - either outcome is right
            outcomes.add("RuleError")
    assert outcomes == {"Rules", "RuleError"}


HOSTILE = "raise RuntimeError('this ran')"


@pytest.mark.parametrize(
    "rule",
    [
        "- {match: {name: x}, replace: {class: hostile_module.Operator}}",
        "- {match: {class: hostile_module.Thing}, replace: {}}",
    ],
)
def test_a_class_of_somebody_else_is_imported_only_from_trusted_rules(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = tmp_path / "hostile_module.py"
    module.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n{HOSTILE}\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuleError, match=r"f.yaml:1 .rule 1.: .*hostile_module.* --trust_rules"):
        parse_rules(rule, "f.yaml")
    assert not (tmp_path / "ran").exists()
    assert not caplog.records
    with pytest.raises(RuleError, match="hostile_module cannot be imported: RuntimeError: this ran"):
        parse_rules(rule, "f.yaml", trust=True)
    assert (tmp_path / "ran").exists()
    (record,) = caplog.records
    assert record.getMessage() == f"--trust_rules: importing hostile_module, code of {module}"


def test_classes_of_modules_that_run_already_need_no_trust() -> None:
    rule = f"- {{match: {{class: {FAKE}}}, replace: {{}}}}"
    assert parse_rules(rule).rules[0].match_class is FakeLinear


def test_a_pattern_that_would_take_for_ever_is_an_error() -> None:
    # Whole lines that end otherwise: every way to cut 60 letters into groups would be tried.
    rule = one(r"- {match: {name: '^(a|a|aa)+\1?(a|aa)+$'}, replace: {}}")
    with pytest.raises(RuleError, match=r"f.yaml:1 \(rule 1\): match.name .* takes longer than 2 s"):
        rule.matches("a" * 60 + "!", nn.Linear(1, 1), "llama")
