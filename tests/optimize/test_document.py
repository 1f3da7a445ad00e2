"""YAML with lines: what comes out, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.errors import RuleError
from ktransformers.optimize.document import MAX_ALIASES, MAX_BYTES, MAX_DEPTH, parse_yaml, read_yaml


def plain(text: str) -> object:
    item = parse_yaml(text, "f.yaml")
    return None if item is None else item.plain()


def test_values_and_lines() -> None:
    item = parse_yaml("- a: 1\n  b: [yes, null, 1.5, 'x']\n\n- cuda:1\n", "f.yaml")
    assert item is not None
    assert item.plain() == [{"a": 1, "b": [True, None, 1.5, "x"]}, "cuda:1"]
    assert isinstance(item.value, list)
    assert [part.line for part in item.value] == [1, 4]
    assert item.value[0].key_lines == {"a": 1, "b": 2}


def test_no_document() -> None:
    assert plain("# nothing\n") is None


def test_anchors_and_merge_keys() -> None:
    text = "- &gpu {generate_device: cuda, out_device: cuda}\n- {<<: *gpu, out_device: cpu}\n- *gpu\n"
    gpu = {"generate_device": "cuda", "out_device": "cuda"}
    assert plain(text) == [gpu, {"generate_device": "cuda", "out_device": "cpu"}, gpu]


def test_of_two_merged_anchors_the_first_wins() -> None:
    assert plain("- &a {x: 1}\n- &b {x: 2, y: 2}\n- {<<: [*a, *b]}\n") == [{"x": 1}, {"x": 2, "y": 2}, {"x": 1, "y": 2}]


def test_unquoted_date_stays_text() -> None:
    assert plain("a: 2024-01-02") == {"a": "2024-01-02"}


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("a: 1\nb: 2\na: 3\n", 3, "'a' stands here twice (first in line 1)"),
        ("a: 1\nb: c: d\n", 2, "not valid YAML"),
        ("a: 1\n---\nb: 2\n", 2, "not valid YAML"),
        ("a: !!python/object/apply:os.system ['true']\n", 1, "tag"),
        ("a: !mine 3\n", 1, "tag"),
        ("a: !!set {x}\n", 1, "tag"),
        ("a: !!binary aGk=\n", 1, "tag"),
        ("a: !!int x\n", 1, "'x' is not a valid int"),
        ("a: !!int ''\n", 1, "'' is not a valid int"),
        ("a: !!bool x\n", 1, "'x' is not a valid bool"),
        ("? [1, 2]\n: 3\n", 1, "a key must be a single value"),
        ("a: &x\n  b: *x\n", 1, "an alias contains itself"),
        ("a: *nobody\n", 1, "not valid YAML"),
        ("\ta: 1\n", 1, "not valid YAML"),
        ("- 1\n- {<<: 3}\n", 2, "`<<` needs a mapping"),
        ("[" * (MAX_DEPTH + 1), 1, "nested deeper"),
        ("- &a x\n" + "- *a\n" * (MAX_ALIASES + 1), MAX_ALIASES + 2, "aliases"),
    ],
)
def test_refused(text: str, line: int, words: str) -> None:
    with pytest.raises(RuleError) as caught:
        parse_yaml(text, "f.yaml")
    assert words in str(caught.value)
    assert caught.value.file == "f.yaml"
    assert caught.value.line == line


def test_billion_laughs() -> None:
    lines = ["- &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"- &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    with pytest.raises(RuleError, match="expands to more than"):
        parse_yaml("\n".join(lines), "f.yaml")


def test_control_characters() -> None:
    with pytest.raises(RuleError, match="not valid YAML"):
        parse_yaml("a: \x00", "f.yaml")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    with pytest.raises(RuleError, match="cannot be read"):
        read_yaml(path)
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")  # a byte order mark is no part of the first key
    item = read_yaml(path)
    assert item is not None
    assert item.plain() == {"a": 1}
    path.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(RuleError, match="UTF-8") as caught:
        read_yaml(path)
    assert caught.value.line == 2
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(RuleError, match="larger than"):
        read_yaml(path)
