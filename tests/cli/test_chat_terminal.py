"""The prompt at a terminal: its keys, its history, what Tab completes. The terminal is a pipe of key presses."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from prompt_toolkit.application import create_app_session
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document
from prompt_toolkit.history import History, InMemoryHistory
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import DummyOutput

from ktransformers.cli import build_parser
from ktransformers.cli.chat import prompt_history
from ktransformers.cli.chat.command import _terminal_source
from ktransformers.cli.chat.completion import ChatCompleter
from ktransformers.cli.chat.input import UserTurn
from ktransformers.cli.chat.prompt_history import PromptHistory, open_history
from ktransformers.cli.chat.settings import PARAMETERS
from ktransformers.cli.chat.terminal import TerminalSource
from ktransformers.errors import ConfigError
from ktransformers.system.user_folders import user_state_dir

CTRL_C, CTRL_D, CTRL_R, UP, ALT_ENTER, TAB = "\x03", "\x04", "\x12", "\x1b[A", "\x1b\r", "\t"


@pytest.fixture
def keyboard() -> Iterator[PipeInput]:
    with create_pipe_input() as pipe:
        yield pipe


class Desk:
    """Somebody who types."""

    def __init__(self, keyboard: PipeInput, history: History | None = None):
        self._keyboard = keyboard
        self.source = TerminalSource(history or InMemoryHistory(), keyboard, DummyOutput())

    def type(self, keys: str) -> UserTurn | None:
        self._keyboard.send_text(keys)
        return self.source.read_turn()

    def confirms(self, keys: str) -> bool:
        self._keyboard.send_text(keys)
        return self.source.confirm("Sure?")


@pytest.fixture
def desk(keyboard: PipeInput) -> Desk:
    return Desk(keyboard)


# --- keys ------------------------------------------------------------------------------------------------------------


def test_lines_and_blocks(desk: Desk) -> None:
    assert desk.type(" hello \r") == UserTurn("hello")
    assert desk.type('"""first\rsecond"""\r') == UserTurn("first\nsecond", is_literal=True)
    assert desk.type('""" one line """\r') == UserTurn(" one line ", is_literal=True)
    assert desk.type(f"a{ALT_ENTER}b\r") == UserTurn("a\nb", is_literal=True)
    assert desk.type("\x1b[200~x\ny\n\x1b[201~\r") == UserTurn("x\ny", is_literal=True)  # pasted
    assert desk.type("\r") == UserTurn("")


def test_ctrl_c_clears_the_line(desk: Desk) -> None:
    assert desk.type(f"nonsense{CTRL_C}hello\r") == UserTurn("hello")
    assert desk.type(f'"""begun\rand more{CTRL_C}hello\r') == UserTurn("hello")
    with pytest.raises(KeyboardInterrupt):
        desk.type(CTRL_C)
    assert desk.type("still here\r") == UserTurn("still here")


def test_ctrl_d_leaves_on_an_empty_line_only(desk: Desk) -> None:
    assert desk.type(f"a{CTRL_D}b\r") == UserTurn("ab")
    assert desk.type(CTRL_D) is None


def test_a_prefilled_prompt(desk: Desk) -> None:
    desk.source.prefill("a question")
    assert desk.type("!\r") == UserTurn("a question!")
    assert desk.type("next\r") == UserTurn("next")
    desk.source.prefill("a question")
    with pytest.raises(KeyboardInterrupt):  # given up, unlike a line that was typed
        desk.type(CTRL_C)
    assert desk.type(f"x{CTRL_C}next\r") == UserTurn("next")


def test_confirmation(desk: Desk) -> None:
    assert [desk.confirms(keys) for keys in ("y\r", " YES \r")] == [True, True]
    assert [desk.confirms(keys) for keys in ("\r", "n\r", "yeah\r", CTRL_C, CTRL_D)] == [False] * 5
    assert desk.type(f"{UP}\r") == UserTurn("")  # answers are not prompts


def test_prompts_are_recalled(desk: Desk) -> None:
    desk.type("first\r")
    desk.type('"""a\rblock"""\r')
    assert desk.type(f"{UP}\r") == UserTurn("a\nblock", is_literal=True)
    assert desk.type(f"{CTRL_R}fir\r\r") == UserTurn("first")


# --- history over sessions -------------------------------------------------------------------------------------------


def test_history_outlives_a_session(keyboard: PipeInput, tmp_path: Path) -> None:
    file = tmp_path / "state" / "ktransformers" / "prompts"
    Desk(keyboard, open_history(file)).type("first\r")
    Desk(keyboard, open_history(file)).type('"""two\rlines"""\r')
    later = Desk(keyboard, open_history(file))
    assert later.type(f"{UP}\r") == UserTurn("two\nlines", is_literal=True)
    assert later.type(f"{UP}{UP}{UP}\r") == UserTurn("first")  # one of them to its first line


def test_history_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    folder.mkdir(mode=0o755)
    (folder / "prompts").touch(mode=0o644)
    history = open_history(folder / "prompts")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "prompts").stat().st_mode) == 0o600
    (folder / "prompts").unlink()
    history.append_string("after it was removed")
    assert stat.S_IMODE((folder / "prompts").stat().st_mode) == 0o600


def recalled(path: Path) -> list[str]:
    return list(open_history(path).load_history_strings())


def test_recording_can_stop(keyboard: PipeInput, tmp_path: Path) -> None:
    path = tmp_path / "s" / "prompts"
    desk = Desk(keyboard, open_history(path))
    desk.type("kept\r")
    desk.source.record_history(False)
    desk.type("secret\r")
    assert desk.type(f"{UP}\r") == UserTurn("secret")  # in this session
    desk.source.record_history(True)
    desk.type("again\r")
    assert recalled(path) == ["again", "kept"]
    without = Desk(keyboard)
    without.source.record_history(False)
    with pytest.raises(ConfigError, match="without a history"):
        without.source.record_history(True)


def test_history_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "s" / "prompts"
    history = open_history(path)
    history.append_string("x" * (prompt_history.MAX_PROMPT + 1))
    assert recalled(path) == []
    history.append_string("\ud800")  # terminals can deliver that
    assert recalled(path) == ["?"]
    for number in range(100):
        history.append_string(f"prompt\n# {number}")
    monkeypatch.setattr(prompt_history, "MAX_BYTES", path.stat().st_size)
    assert len(recalled(path)) == 101
    monkeypatch.setattr(prompt_history, "MAX_BYTES", path.stat().st_size - 1)
    kept = recalled(path)
    assert kept == [f"prompt\n# {number}" for number in reversed(range(100))][: len(kept)]
    assert 40 <= len(kept) <= 50
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["prompts"]


def test_history_that_cannot_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    history = open_history(tmp_path / "file" / "prompts")
    assert isinstance(history, InMemoryHistory)
    assert "prompts are not kept for later sessions" in caplog.text
    path = tmp_path / "s" / "prompts"
    history = open_history(path)
    assert isinstance(history, PromptHistory)
    path.unlink()
    path.mkdir()  # it cannot be written any more
    history.append_string("a")
    history.append_string("b")
    assert caplog.text.count("prompts are no longer kept") == 1
    assert history.get_strings() == ["a", "b"]


@pytest.mark.parametrize(
    ("flags", "variable", "keeps"),
    [((), "", True), ((), "0", False), (("--no-history",), "1", False), (("--history",), "off", True)],
)
def test_when_prompts_are_kept(
    keyboard: PipeInput,
    monkeypatch: pytest.MonkeyPatch,
    own_state_folder: Path,
    flags: tuple[str, ...],
    variable: str,
    keeps: bool,
) -> None:
    monkeypatch.setenv("KTRANSFORMERS_HISTORY", variable)
    with create_app_session(input=keyboard, output=DummyOutput()):
        source = _terminal_source(build_parser().parse_args(["chat", *flags]))
        keyboard.send_text("hello\r")
        assert source.read_turn() == UserTurn("hello")
    assert (own_state_folder / "prompts").exists() == keeps
    if keeps:
        assert recalled(own_state_folder / "prompts") == ["hello"]


def test_where_state_is() -> None:
    assert user_state_dir("linux", {"XDG_STATE_HOME": "/s"}) == Path("/s/ktransformers")
    for environ in ({}, {"XDG_STATE_HOME": "relative"}):
        assert user_state_dir("linux", environ) == Path.home() / ".local" / "state" / "ktransformers"
    assert user_state_dir("darwin", {}).parts[-3:] == ("Library", "Application Support", "ktransformers")
    assert user_state_dir("win32", {"LOCALAPPDATA": "/l"}) == Path("/l/ktransformers/State")


# --- completion ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    (folder / "src").mkdir(parents=True)
    for name in ("src/x.c", "saved.json", "a b.txt"):
        (folder / name).touch()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    return folder


def completed(text: str) -> list[str]:
    """The whole lines that Tab offers."""
    found = ChatCompleter().get_completions(Document(text), CompleteEvent(completion_requested=True))
    return [text[: len(text) + one.start_position] + one.text for one in found]


@pytest.mark.parametrize(
    ("typed", "offers"),
    [
        ("/re", ["/regen"]),
        ("/s", ["/system ", "/set ", "/show ", "/save ", "/save! ", "/stats"]),
        ("/set ", ["/set parameter ", "/set system", "/set history", "/set nohistory", "/set think", "/set nothink"]),
        ("/set parameter m", ["/set parameter min_p ", "/set parameter max_tokens "]),
        ("/set parameter ", [f"/set parameter {name} " for name in PARAMETERS]),
        ("/set parameter top_k 4", []),
        ("/set system x", []),
        ("/show t", ["/show template"]),
        ("/stats x", []),
        ("/save s", ["/save saved.json", "/save src/"]),
        ("/load src/", ["/load src/x.c"]),
        ("/save! ~/sa", ["/save! ~/saved.json"]),
        ("what is @s", ["what is @saved.json", "what is @src/"]),
        ("what is @src/", ["what is @src/x.c"]),
        ("line\n@src/", ["line\n@src/x.c"]),
        ("(@~/sr", ["(@~/src/"]),
        ("@a", ['@"a b.txt']),
        ('@"a b', ['@"a b.txt']),
        ("me@s", []),
        ("请看@src/", ["请看@src/x.c"]),
        ("./s", ["./saved.json", "./src/"]),
        ("~/src/", ["~/src/x.c"]),
        ("hello s", []),
        ("", []),
        ("/help\n/s", []),
    ],
)
def test_completions(here: Path, typed: str, offers: list[str]) -> None:
    assert completed(typed) == offers


def test_absolute_paths_beside_commands(here: Path) -> None:
    assert completed(f"{here}/sa") == [f"{here}/saved.json"]


def test_tab_completes(desk: Desk, here: Path) -> None:
    assert desk.type(f"/reg{TAB}\r") == UserTurn("/regen")
    assert desk.type(f"/set par{TAB}temp{TAB}0.5\r") == UserTurn("/set parameter temperature 0.5")
    assert desk.type(f"see @sr{TAB}{TAB} please\r") == UserTurn("see @src/x.c please")
