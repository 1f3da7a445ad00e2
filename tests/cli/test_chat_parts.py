"""Parts of the chat that need no process."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ktransformers.cli.chat.history import ChatHistory
from ktransformers.cli.chat.input import UserTurn, lines_of, read_prompt_file, read_turn, typed_path
from ktransformers.cli.chat.output import PlainView, format_stats, short_stats
from ktransformers.cli.chat.terminal_view import MarkdownView, split_blocks
from ktransformers.core import GenerationStats
from ktransformers.errors import ConfigError


def turns(text: str) -> list[UserTurn]:
    read_line, found = lines_of(io.StringIO(text)), []
    while (turn := read_turn(read_line)) is not None:
        found.append(turn)
    return found


def test_turns() -> None:
    assert turns("a\r\n b \n\n") == [UserTurn("a"), UserTurn("b"), UserTurn("")]
    assert turns('"""a"""\nb') == [UserTurn("a", True), UserTurn("b")]
    assert turns('"""\n\na\n  b\n"""\n""""""\n') == [UserTurn("a\n  b", True), UserTurn("", True)]


def test_typed_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "with space.txt"
    file.write_text("hi")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert typed_path(str(file)) == file
    assert typed_path("~/with space.txt") == file
    assert [typed_path(text) for text in ("", str(tmp_path), "a\nb", "a\0b", "x" * 5000, "no such")] == [None] * 6


def test_prompt_files(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for content, message in ((b"\xff\xff", "not UTF-8"), (b" \n", "empty")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            read_prompt_file(file)


def test_save_and_load(tmp_path: Path) -> None:
    chat, file = ChatHistory("sys"), tmp_path / "c.json"
    chat.add_user("你好")
    chat.add_assistant("a", "because")
    chat.save(file)
    other = ChatHistory()
    other.load(file)
    assert (other.system, other.turns) == ("sys", chat.turns)
    assert other.messages == chat.messages == json.loads(file.read_text(encoding="utf-8"))
    other.clear()
    assert other.messages == [{"role": "system", "content": "sys"}]
    with pytest.raises(ConfigError, match="cannot save"):
        chat.save(tmp_path)


@pytest.mark.parametrize(
    "data",
    [
        {},
        "x",
        [1],
        [{"role": "robot", "content": "x"}],
        [{"role": [], "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}],
        [{"role": "user", "content": "x", "evil": 1}],
        [{"role": "assistant", "content": "x", "tool_calls": "y"}],
    ],
)
def test_loading_what_is_no_conversation_changes_nothing(tmp_path: Path, data: Any) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps(data))
    chat = ChatHistory("s")
    chat.add_user("kept")
    with pytest.raises(ConfigError, match=r"c\.json"):
        chat.load(file)
    assert [message["content"] for message in chat.messages] == ["s", "kept"]


def test_loading_what_is_no_json(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    for content in ("{", "[" * 100000):
        file.write_text(content)
        with pytest.raises(ConfigError, match="not JSON"):
            ChatHistory().load(file)


def test_blocks() -> None:
    assert split_blocks("a\n\nb") == (["a\n"], "b")
    assert split_blocks("```\na\n\nb\n") == ([], "```\na\n\nb\n")
    assert split_blocks("```\na\n\nb\n```\n\nc") == (["```\na\n\nb\n```\n"], "c")
    assert split_blocks("\n\n\na") == ([], "a")
    assert split_blocks("") == ([], "")


def test_plain_view_one_line_end_per_answer() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = PlainView(out, err)
    for text in ("a", "b\n", ""):
        view.content(text)
        view.end()
    assert out.getvalue() == "a\nb\n\n"


def test_markdown_view_shows_every_block_once() -> None:
    out = io.StringIO()
    with open(os.devnull) as keys:
        view = MarkdownView(Console(file=out, width=60, color_system=None), keys.fileno(), {})
    answer = "# Title\n\npara *one*\n\n- x\n- y\n\n```python\na = 1\n\nb = 2\n```\n\n[not markup]"
    for char in answer:
        view.content(char)
    view.end()
    shown = out.getvalue()
    assert [shown.count(text) for text in ("Title", "para one", "• x", "a = 1", "b = 2", "[not markup]")] == [1] * 6
    assert "\x1b" not in shown  # nothing is redrawn


def test_stats_line() -> None:
    stats = GenerationStats(prompt_len=30, cached_len=10, completion_len=11, prefill_seconds=2.0, decode_seconds=4.0)
    assert format_stats(stats) == (
        "prompt eval: 30 tokens (10 of them reused), 20 in 2.00 s, 10.0 tokens/s · "
        "eval: 11 tokens in 4.00 s, 2.5 tokens/s"
    )
    shown = "11 tokens, 2.5 tokens/s · read 20 in 2.0 s (10.0/s)"
    assert [short_stats(stats, width) for width in (80, len(shown), len(shown) - 1, 40, 23, 22, 12, 4)] == [
        shown,
        shown,
        "11 tokens, 2.5 tokens/s · read 20 in 2.0 s",
        "11 tokens, 2.5 tokens/s",
        "11 tokens, 2.5 tokens/s",
        "2.5 tokens/s",
        "2.5 tokens/s",
        "2.5 ",
    ]
    drafted = replace(stats, num_drafted=1200, num_accepted=7)
    assert format_stats(drafted) == format_stats(stats) + " · 7 of 1,200 draft tokens accepted"
    assert short_stats(drafted, 90) == shown + " · 7 of 1,200 draft tokens accepted"
    assert short_stats(drafted, 80) == shown
    long = GenerationStats(prompt_len=3417, completion_len=1, prefill_seconds=1.1985)
    assert short_stats(long, 80) == "1 token · read 3,417 in 1.2 s (2,851/s)"
    assert short_stats(GenerationStats(prompt_len=3417, prefill_seconds=0.5), 80) == "0 tokens · 0.5 s"
