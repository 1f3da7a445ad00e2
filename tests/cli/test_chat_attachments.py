"""Files that a prompt names with @."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.cli.chat.attachments import attach_files, fenced, with_document
from ktransformers.errors import ConfigError


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "x.c").write_text("int x;\n\n")
    (tmp_path / "a b.txt").write_text("one\r\ntwo\n")
    (tmp_path / "noext").write_text("plain")
    return tmp_path


def attached(text: str) -> tuple[str, list[str]]:
    notes: list[str] = []
    return attach_files(text, notes.append).text, notes


def test_a_file_follows_the_question(here: Path) -> None:
    text, notes = attached("what does @src/x.c do?")
    assert text == "what does @src/x.c do?\n\nsrc/x.c:\n```c\nint x;\n```"
    assert notes == ["attached src/x.c, 1 line, 6 characters"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('see @"a b.txt"', "a b.txt"),
        ("see @noext, please", "noext"),
        ("(@noext)", "noext"),
        ('"@noext"', "noext"),
        ("is it @noext?!", "noext"),
        ("line\n@noext", "noext"),
        ("@~/noext", "~/noext"),
        ("@./src/x.c.", "./src/x.c"),
        ("explain @src/x.c's use", "src/x.c"),
        ("请看@src/x.c中的实现。", "src/x.c"),
        ("阅读 @src/x.c，再看x", "src/x.c"),
    ],
)
def test_spellings(here: Path, text: str, name: str) -> None:
    found, notes = attached(text)
    assert found.startswith(f"{text}\n\n{name}:\n```")
    assert len(notes) == 1


@pytest.mark.parametrize(
    "text",
    [
        "mail me@noext now",
        "@property\ndef f(): ...",
        "a @ b",
        "@",
        "@@noext",
        'say @""',
        "x/@noext",
        "@\0",
        "@noext.c",
        "@noext-2",
        "@no",
    ],
)
def test_what_stays_text(here: Path, text: str) -> None:
    assert attached(text) == (text, [])


def test_what_was_meant_as_a_path_is_said(here: Path) -> None:
    assert attached("see @src/y.c and @src/") == (
        "see @src/y.c and @src/",
        ["src/y.c is no file here: nothing is attached for it", "src/ is a folder: nothing is attached for it"],
    )
    assert attached('@"b c"')[1] == ["b c is no file here: nothing is attached for it"]


def test_several_files_each_once(here: Path) -> None:
    text, notes = attached("@noext @src/x.c @noext")
    assert text.count("```") == 4
    assert [note.split(",")[0] for note in notes] == ["attached noext", "attached src/x.c"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\xff\xfe", "x is not UTF-8 text, so it cannot be attached"),
        (b"a\0b", r"x is not text \(it has zero bytes\), so it cannot be attached"),
        (b" \n", "x is empty, so it cannot be attached"),
    ],
)
def test_files_that_are_no_text(here: Path, content: bytes, message: str) -> None:
    (here / "x").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        attached("@x")


def test_files_that_are_too_large(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.cli.chat.input._MAX_FILE_BYTES", 4)
    with pytest.raises(ConfigError, match="noext has more than 0 MiB, too much"):
        attached("@noext")


@pytest.mark.parametrize("ticks", [0, 1, 2, 3, 4, 7])
def test_a_document_cannot_close_its_fence(ticks: int) -> None:
    document = f"text\n{'`' * ticks}\nmore"
    first, *inside, last = fenced(document).split("\n")
    assert first == last == "`" * max(3, ticks + 1 if ticks > 2 else 3)
    assert "\n".join(inside) == document
    assert not any(line.strip().startswith(first) for line in inside)


def test_a_prompt_without_a_document() -> None:
    assert with_document("p", "") == "p"
    assert with_document("p", "d") == "p\n\n```\nd\n```"
