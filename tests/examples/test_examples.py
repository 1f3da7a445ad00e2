"""The examples for users, and the snippets of docs/python.md: each runs, and says what it promises."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktransformers.config import DEMO_MODEL_PATH
from tests.support.models.demo import DEMO_CHECKPOINT

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
DEMO = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))))


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Python puts a script's folder on the path; modules from there must not leak into other tests."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in set(sys.modules) - before:
        if str(EXAMPLES) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("script", "says"),
    [
        (
            "offline.py",
            [r"^17 \+ 25 = 42\.$", r"What is 15 \+ 25\? 15 \+ 25 = 40", r"SamplingParams\(top_p"],
        ),
        ("many_tasks.py", [r"25\? -> 17 \+ 25 = 42", "kernel -> .*l-e-n-r-e-k", " stop$"]),
        ("with_rules.py", [r"^model\.layers\.1\.mlp\.experts: cpu, 2\.1 MB$", "42"]),
        ("own_operator.py", [r"^model\.layers\.3\.mlp\.gate: \d+ experts, most often \d+ \(\d+ times\)", "42"]),
    ],
)
def test_an_example_runs(
    script: str,
    says: list[str],
    on_path: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [script, str(DEMO)])
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
    out = capsys.readouterr().out
    for pattern in says:
        assert re.search(pattern, out, re.M), out


def test_no_example_hides_a_module_of_pythons() -> None:
    """A script's folder comes first on the path: a file named like a standard module would break every other one."""
    names = {path.stem for path in EXAMPLES.glob("*.py")} | {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert not names & set(sys.stdlib_module_names)


def test_the_index_names_every_example() -> None:
    index = (EXAMPLES / "README.md").read_text()
    for path in EXAMPLES.iterdir():
        assert path.name == "README.md" or path.name.startswith("__") or f"]({path.name}" in index, path


def test_the_snippets_of_the_docs_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.gguf").symlink_to(DEMO)
    (tmp_path / "folder").symlink_to(DEMO_CHECKPOINT)
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "python.md").read_text()
    namespace: dict[str, object] = {}
    for match in re.finditer(r"^```python\n(.*?)^```$", text, re.M | re.S):
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], "docs/python.md", "exec"), namespace)
    out = capsys.readouterr().out
    promised = re.findall(r"print\(error\)  # (?:\.\.\. )?(.*)$", text, re.M)
    assert len(promised) == 5
    for promise in promised:
        for part in promise.removesuffix(" ...").split(" ... "):
            assert part in out, out
    assert "17 + 25 = 42." in out
