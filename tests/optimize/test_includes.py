"""Rule files that include others: what the rules become, where they are looked for, errors, warnings, the plan."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path

import pytest
from rich.console import Console

from ktransformers.config import EngineConfig
from ktransformers.engine.parallel.ranks.messages import Start, decode, encode
from ktransformers.errors import RuleError
from ktransformers.optimize.includes import MAX_INCLUDES
from ktransformers.optimize.machine import Machine
from ktransformers.optimize.plan import Plan
from ktransformers.optimize.report import print_plan, to_json
from ktransformers.optimize.rules import Rules, load_rules, parse_rules
from ktransformers.system.shipped_rules import RULES_DIR, is_shipped, shipped_names, shipped_path
from tests.support.engines.fake_operators import GIB, inlined_rules, meta_model, plan_with

TWO_GPUS = Machine(8 * GIB, 4 * GIB, {"cpu": 4 * GIB, "cuda:0": GIB, "cuda:1": GIB})
LINEAR = "{class: tests.support.engines.fake_operators.FakeLinear}"


def rule(name: str, replace: str = "{}") -> str:
    return f"- match: {{name: '{name}'}}\n  replace: {replace}\n"


def written(folder: Path, **texts: str) -> Path:
    """Files of these names; the path of the first."""
    for name, text in texts.items():
        path = folder / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return folder / f"{next(iter(texts))}.yaml"


def names(rules: Rules) -> list[str]:
    return [one.name.pattern for one in rules.rules if one.name is not None]


def places(rules: Rules) -> list[tuple[str, int, int]]:
    return [(Path(one.file).name, one.line, one.number) for one in rules.rules]


def test_rules_are_spliced_in_where_the_include_stands(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=rule("first") + "- include: b.yaml\n" + rule("last"),
        b="# of b\n\n" + rule("b1") + "- {include: sub/c.yaml}\n" + rule("b3"),
        **{"sub/c": "- include: d.yaml\n" + rule("c2"), "sub/d": rule("d1")},
    )
    rules = load_rules(path)
    assert names(rules) == ["first", "b1", "d1", "c2", "b3", "last"]
    assert places(rules) == [
        ("a.yaml", 1, 1), ("b.yaml", 3, 1), ("d.yaml", 1, 1), ("c.yaml", 2, 2), ("b.yaml", 6, 3), ("a.yaml", 4, 3),
    ]  # fmt: skip


def test_a_file_beside_comes_before_a_shipped_one(tmp_path: Path) -> None:
    path = written(tmp_path, a="- include: Mixtral.yaml\n")
    (first, *_) = load_rules(path).rules
    assert Path(first.file) == RULES_DIR / "Mixtral.yaml"
    written(tmp_path, Mixtral=rule("mine"))
    assert names(load_rules(path)) == ["mine"]


@pytest.mark.parametrize("name", ["Llama4.yaml", "default-dense.yaml", "DeepSeek-V3-Chat-serve.yaml"])
def test_shipped_files_are_found_by_name_wherever_they_are(name: str, tmp_path: Path) -> None:
    inlined = parse_rules(inlined_rules(name))
    for rules in (load_rules(written(tmp_path, a=f"- include: {name}\n")), parse_rules(f"- include: {name}\n")):
        assert [(one.describe(), one.operator) for one in rules.rules] == [
            (one.describe(), one.operator) for one in inlined.rules
        ]


def test_a_file_may_be_included_twice(tmp_path: Path) -> None:
    path = written(tmp_path, a="- include: b.yaml\n- include: c.yaml\n", b="- include: c.yaml\n", c=rule("c"))
    assert names(load_rules(path)) == ["c", "c"]


def test_an_absolute_path_and_one_with_folders(tmp_path: Path) -> None:
    written(tmp_path / "other", b=rule("b"))
    path = written(tmp_path / "mine", a=f"- include: {tmp_path}/other/b.yaml\n- include: ../other/b.yaml\n")
    assert names(load_rules(path)) == ["b", "b"]


# Errors.

WRONG = {
    "- {include: b.yaml, recursive: false}": r"a.yaml:1 \(rule 1\): include stands alone in its entry; move recursive",
    "- include: [b.yaml]": r"a.yaml:1 \(rule 1\): include must be the path of a rule file, not a list",
    "- include: 3": r"include must be the path of a rule file, not a number",
    "- include:": r"include must be the path of a rule file, not empty",
    "- include: ''": r"include must be the path of a rule file, not text",
    "- {match: {name: x}, replace: {}}\n- include: default-mo.yaml": r"a.yaml:2 \(rule 2\): include: .*/default-mo.yaml"
    r" does not exist, and no shipped file is called default-mo.yaml; did you mean default-moe.yaml\?",
    "- include: zzz.yaml": r"no shipped file is called zzz.yaml; shipped are .*Mixtral.yaml",
    "- include: optimize_rules/Mixtral.yaml": r"the shipped file of that family is Mixtral.yaml",
    "- include: DeepSeek-V3-Chat-multi-gpu-8.yaml": r"the shipped file of that family is DeepSeek-V3-Chat.yaml",
    '- include: "\\0"': r"include: ",
    f"- include: {'x' * 5000}": r"a.yaml:1 \(rule 1\): include: ",
    "- include: .": r"cannot be read: it is a folder, not a file \(included from .*a.yaml:1\)",
    "include: default-moe.yaml": r"a.yaml:1: must be a list of rules",
}


@pytest.mark.parametrize(("text", "message"), WRONG.items())
def test_wrong_includes(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=message):
        load_rules(written(tmp_path, a=text))


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("", "c.yaml", "holds no rules"),
        ("match: {}", "c.yaml:1", "must be a list of rules"),
        ("\n- {match: {name: x}, replaces: {}}", r"c.yaml:2 \(rule 1\)", "did you mean replace"),
        ("- {match: {name: '('}, replace: {}}", r"c.yaml:1 \(rule 1\)", "is not a regular expression"),
        ("- {match: {name: x}, match: {}}", r"c.yaml:1 \(rule 1\)", "the key 'match' stands here twice"),
        ("- [\n", "c.yaml:2", "is not valid YAML"),
        ("- include: nothing.yaml", r"c.yaml:1 \(rule 1\)", "no shipped file is called nothing.yaml"),
    ],
)
def test_errors_name_the_included_file_and_what_includes_it(
    text: str, place: str, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, a="\n- include: b.yaml\n", b="[{include: c.yaml}]", c=text)
    with pytest.raises(RuleError, match=rf"/{place}: .*{message}.* \(included from .*/b.yaml:1, from .*/a.yaml:2\)$"):
        load_rules(path)


def test_errors_of_the_plan_name_them_too(tmp_path: Path) -> None:
    text = rule("lm_head", f"{LINEAR[:-1]}, kwargs: {{generate_device: 'cuda:3'}}}}")
    path = written(tmp_path, a="- include: b.yaml\n", b=text)
    with pytest.raises(RuleError, match=r"b.yaml:1 \(rule 1\): there is no cuda:3 .* \(included from .*a.yaml:1\)"):
        plan_with(meta_model("llama"), load_rules(path, trust=True), machine=TWO_GPUS)


def test_hidden_experts_of_an_included_file_are_found(tmp_path: Path) -> None:
    path = written(tmp_path, a=rule(r"^model\.layers\.") + "- include: default-moe.yaml\n")
    with pytest.raises(RuleError, match=r"it hides rule 10 of default-moe.yaml \(line \d+\), which replaces them"):
        plan_with(meta_model("qwen3_moe"), load_rules(path))


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a": "- include: a.yaml\n"}, r"a.yaml:1 \(rule 1\): include: a.yaml includes itself$"),
        (
            {"a": rule("x") + "- include: b.yaml\n", "b": "- include: sub/../a.yaml\n", "sub/x": "[]"},
            r"b.yaml:1 \(rule 1\): include: sub/../a.yaml includes itself \(included from .*a.yaml:3\)$",
        ),
        ({"Mixtral": "- include: Mixtral.yaml\n"}, r"includes itself; it hides the shipped Mixtral.yaml"),
    ],
)
def test_circles_are_refused(texts: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=message):
        load_rules(written(tmp_path, **texts))


def test_files_that_double_with_each_level_are_refused(tmp_path: Path) -> None:
    levels = {f"f{i}": f"- include: f{i + 1}.yaml\n" * 2 for i in range(30)}
    with pytest.raises(RuleError, match=f"more than {MAX_INCLUDES} files are included"):
        load_rules(written(tmp_path, **levels, f30="[]"))


# Rules that decide nothing.


def planned(path: Path, model_type: str, strict: bool = False) -> Plan:
    return plan_with(meta_model(model_type), load_rules(path, trust=True), strict=strict)


@pytest.mark.parametrize("name", ["default-moe.yaml", "Qwen3Moe-serve.yaml"])
def test_generic_rules_need_not_match(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path, a=rule("lm_head", LINEAR) + f"- include: {name}\n")
    assert planned(path, "qwen3_moe", strict=True).unmatched == ()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_overridden_rules_of_an_own_included_file_are_no_mistake(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        a=rule("lm_head", LINEAR) + "- include: b.yaml\n- include: c.yaml\n",
        b=rule("lm_head$") + rule("norm"),
        c=rule("norm$"),
    )
    assert planned(path, "llama", strict=True).unmatched == ()


@pytest.mark.parametrize(
    ("a", "b", "file", "message"),
    [
        ("- include: b.yaml\n", rule("lm_head") + rule("lm_haed"), "b.yaml", "matches nothing"),
        ("- include: b.yaml\n", rule("norm") + rule("norm$"), "b.yaml", "decides nothing: rule 1 above"),
        (
            "- include: b.yaml\n" + rule("lm_head$"),
            rule("lm_head"),
            "a.yaml",
            "decides nothing: .*/b.yaml:1, included above, comes first for all it matches, such as 'lm_head'",
        ),
        (
            "- include: default-dense.yaml\n" + rule("lm_head$"),
            "[]",
            "a.yaml",
            r"decides nothing: default-dense.yaml:\d+, included above, comes first",
        ),
        (
            "- include: b.yaml\n",
            "- include: default-dense.yaml\n" + rule("lm_head$"),
            "b.yaml",
            r"decides nothing: default-dense.yaml:\d+, included above, comes first",
        ),
    ],
)
def test_mistakes_are_reported(
    a: str, b: str, file: str, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path, a=a, b=b)
    (found,) = planned(path, "llama").unmatched
    assert Path(found.file).name == file
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    with pytest.raises(RuleError, match=f"--strict.*\n  .*/{file}:{found.line} .*{message}"):
        planned(path, "llama", strict=True)
    assert f"{file}:{found.line} (rule {found.rule})" in record.getMessage()


# The plan.


def table(plan: Plan) -> list[str]:
    console = Console(width=300, file=io.StringIO())
    print_plan(plan, console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_the_plan_says_which_file_and_line_decided(tmp_path: Path) -> None:
    path = written(tmp_path, a=rule("lm_head", LINEAR) + "- include: default-moe.yaml\n")
    plan = planned(path, "qwen3_moe")
    lines = shipped_path("default-moe.yaml").read_text().splitlines()
    found = {entry.key: (entry.rule, entry.rule_place) for entry in plan.entries}
    assert found["lm_head"] == (1, "")
    number, place = found["model.layers.0.mlp.experts"]
    name, _, line = place.partition(":")
    assert (number, name) == (10, "default-moe.yaml")
    assert lines[int(line)] == '    name: "\\\\.experts$"'
    (row,) = [line for line in table(plan) if "mlp.experts " in line]
    assert row.split()[-1] == place
    document = json.loads(json.dumps(to_json(plan)))
    assert {one["rule_place"] for one in document["entries"] if one["key"].endswith("mlp.experts")} == {place}


def test_rules_of_two_files_with_one_number_are_not_folded(tmp_path: Path) -> None:
    linear = f"{LINEAR[:-1]}, kwargs: {{bits: 4}}}}"
    path = written(
        tmp_path,
        a=rule(r"layers\.0\..*q_proj", linear) + "- include: b.yaml\n",
        b=rule(r"layers\.1\..*q_proj", linear),
    )
    rows = [line.split()[-1] for line in table(planned(path, "llama")) if "q_proj" in line]
    assert rows == ["1", f"{tmp_path}/b.yaml:1"]


# Other processes.


def test_a_path_of_another_installation_means_the_file_of_this_one() -> None:
    theirs = Path("/elsewhere/ktransformers/optimize/optimize_rules/families/Llama4.yaml")
    config = EngineConfig(optimize_config_path=theirs, spread_layers=True)
    sent = Start(0, "", config, 1, 1, 1, "", "info")
    resolved = decode(encode(sent), Start).config.resolved(needs_model=False)
    assert resolved.optimize_config_path == shipped_path("Llama4.yaml")
    assert resolved.spread_layers  # what the name that was given there meant
    assert load_rules(shipped_path("Llama4.yaml")).rules


def test_a_copy_of_the_shipped_files_is_one_too(tmp_path: Path) -> None:
    """A clone beside an installed package: its files include each other, and are as generic."""
    folder = tmp_path / "optimize_rules" / "families"
    path = written(folder, Dots1="- include: default-moe.yaml\n")
    written(folder.parent, **{"default-moe": shipped_path("default-moe.yaml").read_text()})
    assert is_shipped(path)
    assert is_shipped(folder.parent / "default-moe.yaml")
    assert not is_shipped(folder.parent / "mine.yaml")
    assert not is_shipped(tmp_path / "default-moe.yaml")
    assert planned(folder.parent / "default-moe.yaml", "mixtral", strict=True).unmatched == ()


def test_every_name_is_in_one_folder() -> None:
    assert len(shipped_names()) == len(set(shipped_names()))
    assert all(is_shipped(shipped_path(name)) for name in shipped_names())
