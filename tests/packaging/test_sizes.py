"""Sizes that keep the code readable: lines of a file, files of a folder, and how often a package says `Any`.

An exception has its reason and its size, which may shrink and never grow; one that is not needed any more is an error.
"""

from __future__ import annotations

import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_LINES, MAX_FILES = 500, 25
CODE = (".py", ".pyi", ".cpp", ".h", ".inl", ".ts", ".tsx", ".js", ".css", ".yaml", ".sh")
LINES_OF = (".py", ".pyi", ".cpp", ".h", ".inl")

LONG_FILES = {
    "tests/cli/test_terminal_view.py": 520,  # a terminal, key by key
    "tests/scheduler/test_scheduler.py": 590,  # plans worked out by hand, on one set of helpers
    "tests/server/api/test_responses.py": 510,
    "tests/server/http/test_hostile_clients.py": 520,
    "tests/server/multi_model/test_gateway.py": 610,  # one gateway for all of its cases
    "tests/server/test_requests.py": 550,
    "tests/weights/test_low_bits.py": 530,
}
"""Most lines of each. All are tests: to be parted when they are next worked on."""

ANY = {
    "bench": 35,
    "benchmarks": 24,
    "cli": 35,
    "cluster": 24,
    "convert": 9,
    "core.py": 8,
    "engine": 197,
    "kernels": 66,
    "media": 8,
    "models": 39,
    "operators": 208,
    "optimize": 7,
    "profiling": 69,
    "server": 313,
    "tokenizer": 297,
    "weights": 5,
}
"""How often a package may say `Any`, imports aside. Most is JSON and `transformers`, which has no types."""


def tracked_files() -> list[Path]:
    """Relative to the root, those that are there."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("this is no clone of the repository")
    return [Path(name) for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def num_any(source: str) -> int:
    """How often a source says Any, outside of imports."""
    if "Any" not in source:  # as in most files, and tokens take their time
        return 0
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    count, is_import, depth = 0, False, 0
    for before, token in zip([None, *tokens], tokens, strict=False):
        starts = before is None or before.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)
        if starts and depth == 0:
            is_import = token.string in ("from", "import")
        depth += (token.string in ("(", "[", "{")) - (token.string in (")", "]", "}"))
        count += token.type == tokenize.NAME and token.string == "Any" and not is_import
    return count


def test_no_file_is_longer_than_a_reader_reads() -> None:
    files = [path for path in tracked_files() if path.suffix in LINES_OF]
    assert len(files) > 1000
    lines = {str(path): (ROOT / path).read_text(encoding="utf-8").count("\n") for path in files}
    too_long = {name: count for name, count in lines.items() if count > LONG_FILES.get(name, MAX_LINES)}
    assert not too_long, f"part these files by subject; at most {MAX_LINES} lines: {too_long}"
    stale = {name for name in LONG_FILES if lines.get(name, 0) <= MAX_LINES}
    assert not stale, f"these are short enough now, take them off the list: {stale}"


def test_no_folder_has_more_files_than_a_reader_sees() -> None:
    counts = Counter(str(path.parent) for path in tracked_files() if path.suffix in CODE)
    too_many = {name: count for name, count in counts.items() if count > MAX_FILES}
    assert not too_many, f"give what is in these folders rooms; at most {MAX_FILES} files of code: {too_many}"


def test_no_package_says_any_more_often_than_it_did() -> None:
    counts: Counter[str] = Counter()
    for path in tracked_files():
        if path.suffix == ".py" and path.parts[0] in ("ktransformers", "benchmarks"):
            package = path.parts[1] if path.parts[0] == "ktransformers" else path.parts[0]
            counts[package] += num_any((ROOT / path).read_text(encoding="utf-8"))
    over = {name: f"{count}, was {ANY.get(name, 0)}" for name, count in counts.items() if count > ANY.get(name, 0)}
    assert not over, f"say the type (object, a Protocol, a TypedDict) in place of Any: {over}"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("from typing import Any\nx: Any = 1\n", 1),
        ("from typing import (\n    Any,\n    cast,\n)\n\n\ndef f(x: dict[str, Any]) -> Any: ...\n", 2),
        ("if True:\n    import Any\n    x: list[Any]\n", 1),
        ('"""Any"""  # Any\nAnything = 1\n', 0),
    ],
)
def test_what_counts_as_any(source: str, count: int) -> None:
    assert num_any(source) == count
