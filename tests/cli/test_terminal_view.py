"""What a terminal shows of an answer against what a pipe gets: the same, but for rows and colours."""

from __future__ import annotations

import io
import os
import re
import select
import shlex
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest
from rich.console import Console

from ktransformers.cli.chat.loop import ChatLoop, ChatOptions
from ktransformers.cli.chat.output import PlainView, View
from ktransformers.cli.chat.terminal_text import Highlighter, Style, TextLayout, render
from ktransformers.cli.chat.terminal_view import MarkdownView, TerminalView, palette_of
from ktransformers.cli.loading import StatusLine
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from tests.support.engines.fake_runner import scripted_engine
from tests.support.engines.stepping import Stepping
from tests.support.servers.screen import MemoryScreen, Window, open_window, set_size, undo_wrapping
from tests.support.servers.terminal import PROGRAM, TIMEOUT, Terminal

XTERM = {"TERM": "xterm"}
NEVER = 1e9  # seconds
CODE = "".join(
    f"{'    ' * (n % 5)}value_{n} = compute(`{n}`, '#', {'long_argument, ' * (n % 9)}2*3*4)\n" for n in range(18)
)
PROSE = "The quick brown fox, who is *very* fast, jumps over the lazy dog and then over `another one`; so it goes. "
ANSWERS = {
    "code": f"Here it is:\n\n```python\n{CODE}```\n\nThat was it.",
    "paragraphs": f"{PROSE * 5}\n\n# A heading\n\n{PROSE}",
    "lists": f"- one\n- two\n  - {PROSE}\n    1. deeper\n* {PROSE}\n\n1) first\n2) second\n",
    "stars": "2*3*4 is 24, *a* **b** _c_ __d__ a_b_c \\* \\` \\\\ 1*",
    "html": "<div class='x'>\n  <b>bold</b> &amp; <br/> <think-not>\n</div> <!-- gone? -->",
    "nested fences": "````markdown\n```python\na = `1`\n```\n````\n~~~\n```\n~~~\n``a ` b`` ```in``` it\n```one```\n",
    "open fence": "```\n``\n``` no\n    ```\n  ```js\nx",
    "tables": f"| a | b |\n|---|:-:|\n| 1 | {'wide ' * 20}|\n|{'-' * 78}|\n",
    "long words": f"see https://{'a' * 200}?q=1 and {'b' * 80} {'c' * 79} {'d' * 81}\n{'e' * 80}\n{'f' * 160}\n",
    "cjk": "你好，世界。" * 30 + "mixed with English words 和中文" * 8 + "\nかな カナ 한국어 " * 9,
    "emoji": "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪🇫🇷🇮🇹❤\ufe0f ⚠\ufe0f e\u0301 " * 12,
    "spaces": f"trailing   \n \n  two  spaces{' ' * 100}end {PROSE}   \n   indented {PROSE}",
    "tabs": "\ta\tb\n" + "word\tword " * 30 + f"\n```\n{'x' * 79}\ty\n{'x' * 80}\ty\n\t\t\t\t\t\t\t\t\t\t\t\tz\n```\n",
    "empty lines": "\n\na\n\n\n\nb\n\n",
    "crlf": f"one\r\n{PROSE}\r\n\r\n```\r\ncode\r\n```\r\nend\r\n",
    "nothing": "",
}
CONTROLS = "\x1b[2J\x1b]0;title\x07 a\rb \x08\x00\x7f\x9b31m \x85 end"
VISIBLE = "␛[2J␛]0;title␇ a␍b ␈␀␡\ufffd31m \ufffd end"


def chat(view: View, reply: Callable[[str], str], max_new_tokens: int = 8000) -> ChatLoop:
    """The real loop on a model that says what it is told to."""
    engine = scripted_engine(reply, 16000, max_new_tokens=max_new_tokens)
    options = ChatOptions(SamplingParams(temperature=0.0, max_tokens=max_new_tokens), is_interactive=True)
    return ChatLoop(LLM.from_engine(engine), view, lambda is_inside: None, options)


def piped(answer: str) -> str:
    out = io.StringIO()
    chat(PlainView(out, io.StringIO()), lambda _: answer).answer("?")
    return out.getvalue()


def terminal_view(window: Window, delay: float = NEVER) -> TerminalView:
    return TerminalView(window.out, window.fd, XTERM, delay=delay)


@pytest.mark.every(5)
@pytest.mark.parametrize("name", ANSWERS)
def test_terminal_shows_what_a_pipe_gets(name: str) -> None:
    plain = piped(ANSWERS[name])
    assert plain.removesuffix("\n") == ANSWERS[name].removesuffix("\n")
    with open_window() as window:
        chat(terminal_view(window), lambda _: ANSWERS[name]).answer("?")
    *rows, speed = window.screen.rows()
    assert re.fullmatch(r"[\d,]+ tokens?(, [\d.,]+ tokens/s)? · read \d+ in [\d.]+ s \([\d.,]+/s\)", speed)
    text = plain.replace("\r", "")
    assert undo_wrapping(rows, text) == text
    assert b"\r\n" in window.raw
    assert not re.search(rb"\x1b\[[\d;]*[^\d;m]", window.raw)  # colours and nothing else
    assert window.raw.count(b"\r") == window.raw.count(b"\n") + plain.count("\r")  # no line is written twice


def rows_of(*chunks: str) -> list[str]:
    """What a view shows of an answer."""
    with open_window() as window:
        view = terminal_view(window)
        for chunk in chunks:
            view.content(chunk)
        view.end()
    return window.screen.rows()


def test_control_characters_become_visible() -> None:
    assert rows_of(*CONTROLS) == [VISIBLE]
    assert rows_of("end\r") == ["end␍"]


def test_prose_is_broken_at_words_and_code_where_a_row_is_full() -> None:
    *rows, _ = rows_of(PROSE * 5)
    assert len(rows) >= 6
    assert all(row.endswith(" ") and 70 < len(row) <= 80 for row in rows)
    _, first, second, _ = rows_of(f"```\n{PROSE}\n```")
    assert (first, second) == (PROSE[:80], PROSE[80:])


def test_plain_text_on_a_terminal_is_safe_too() -> None:
    with open_window() as window:
        view = PlainView(window.out, window.out)
        view.content(CONTROLS)
        view.reasoning("\x1b[2J")
        view.end()
        view.error("\x1b[2J")
    assert window.raw.decode() == f"{VISIBLE}␛[2J\r\n\r\nerror: ␛[2J\r\n"


def test_no_row_begins_with_a_full_stop() -> None:
    for shift in range(4):
        rows = rows_of("a" * shift, *"世界你好。" * 40)
        assert "".join(rows) == "a" * shift + "世界你好。" * 40
        assert not [row for row in rows if row.startswith("。")]


def test_lone_surrogates_are_what_a_pipe_gets() -> None:
    buffer = io.BytesIO()
    out = io.TextIOWrapper(buffer, encoding="utf-8", errors="replace")
    plain = PlainView(out, io.StringIO())
    plain.content("a\ud800b \udcff")
    plain.end()
    assert rows_of("a\ud800b", " \udcff") == buffer.getvalue().decode().splitlines()


def test_reasoning_is_dim_and_a_line_apart() -> None:
    with open_window() as window:
        chat(terminal_view(window), lambda _: f"<think>\n{PROSE}`x`</think>\n\nthe answer").answer("?")
    *rows, blank, content, _ = window.screen.rows()
    assert ("".join(rows), blank, content) == (f"{PROSE}`x`", "", "the answer")
    assert re.match(rb"(\x1b\[2m[^\x1b]+\x1b\[0m)+\r\n", window.raw)
    assert re.search(rb"\r\n\r\nthe answer\r\n", window.raw)


def test_colors_keep_all_characters() -> None:
    def styles(text: str) -> str:
        highlighter = Highlighter()
        cells = [*highlighter.feed(text), *highlighter.flush()]
        assert "".join(cell.char for cell in cells) == text
        return "".join(
            cell.char if cell.char in "\n " else {Style.PLAIN: "."}.get(cell.style, cell.style[0]) for cell in cells
        )

    assert styles("a `b` c\n`open\nd") == ". ccc .\nccccc\n."
    assert styles("``a ` b`` c") == "ccc c ccc ."
    assert styles("## Title `x`\n#no\n####### no\n#") == "hh hhhhh ccc\n...\n....... ..\n."
    assert styles("```py\n# a\n``\n```\nb") == "fffff\nc c\ncc\nfff\n."
    assert styles("~~~~\n~~~\n~~~~ \nb") == "ffff\nccc\nffff \n."
    assert styles("  ```\n  ``` x\n```` \n``b") == "  fff\n  fff c\nffff \nccc"
    assert styles("~~a~~ ```b``` ``") == "..... ccccccc cc"


def test_palettes() -> None:
    def raw(environ: dict[str, str]) -> str:
        layout, highlighter = TextLayout(lambda: 80), Highlighter()
        return render(layout.feed(highlighter.feed("# a\n`b` c\n")), palette_of(environ))

    assert raw(XTERM) == "\x1b[1m# a\x1b[0m\n\x1b[36m`b` \x1b[0mc\n"
    assert raw(XTERM | {"NO_COLOR": "1"}) == "\x1b[1m# a\x1b[0m\n`b` c\n"
    assert raw({"TERM": "dumb"}) == raw({}) == "# a\n`b` c\n"


def test_window_that_changes_its_size() -> None:
    with open_window(40) as window:
        view = terminal_view(window)
        for n, word in enumerate(PROSE.split()):
            view.content(word + " ")
            if n == 9:
                set_size(window.fd, 20)
        view.end()
    rows = window.raw.decode().replace("\r", "")
    rows = re.sub(r"\x1b\[[\d;]*m", "", rows).split("\n")
    assert len(rows[0]) > 20
    assert all(len(row) <= 20 for row in rows[2:])
    assert "".join(rows) == PROSE


@pytest.mark.exhaustive
def test_markdown_is_printed_when_it_is_complete() -> None:
    with open_window() as window:
        console = Console(file=window.out, width=80, force_terminal=True, color_system="standard")
        view = MarkdownView(console, window.fd, XTERM, delay=0)
        chat(view, lambda _: f"<think>hm</think># Title\n\n{PROSE}\n\n```python\n{CODE}\n```\n\x1b[2J").answer("?")
    rows = [row.strip() for row in window.screen.rows()]
    assert (rows[0], rows[1]) == ("hm", "")
    text = "\n".join(rows)
    assert [text.count(part) for part in ("Title", "value_0 ", "value_59", "␛[2J", "writing")] == [1, 1, 1, 1, 0]
    assert b"writing, line 60\x1b[K" in window.raw
    assert not re.search(rb"\x1b\[\d*[A-JL-ln-z]", window.raw)  # colours, and a line that is erased


# --- keys ------------------------------------------------------------------------------------------------------------


class Watched(TerminalView):
    """A view that does something after some pieces of content."""

    def __init__(self, window: Window, deeds: dict[int, Callable[[], object]]):
        super().__init__(window.out, window.fd, XTERM, delay=NEVER)
        self._deeds, self._count = deeds, 0

    def content(self, text: str) -> None:
        super().content(text)
        self._count += 1
        self._deeds.get(self._count, lambda: None)()


def test_keys_during_an_answer_are_not_shown_and_wait_for_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    Stepping(monkeypatch, 41)  # two of the prompt, the second of which gives a token: 40 tokens, and no more

    def type_ahead() -> None:
        window.type(b"next question\r")
        assert select.select([window.fd], [], [], TIMEOUT)[0]  # the terminal has them, and has echoed them if it does

    with open_window() as window:
        before = termios.tcgetattr(window.fd)
        deeds = {
            20: type_ahead,
            40: lambda: signal.raise_signal(signal.SIGINT),
        }
        loop = chat(Watched(window, deeds), lambda _: "on and on " * 100)
        loop.answer("?")
        assert termios.tcgetattr(window.fd) == before
        raw = termios.tcgetattr(window.fd)
        raw[3] &= ~termios.ICANON  # as the prompt reads it
        termios.tcsetattr(window.fd, termios.TCSANOW, raw)
        assert os.read(window.fd, 100) == b"next question\n"
    assert loop.conversation.messages[-1]["content"] == "on and on " * 4
    first, stopped, speed = window.screen.rows()
    assert (first, stopped) == ("on and on " * 4, "stopped")
    assert speed.startswith("40 tokens, ")


def test_terminal_is_restored_after_an_error() -> None:
    def fail() -> None:
        raise RuntimeError("the view fails here")

    with open_window() as window:
        before = termios.tcgetattr(window.fd)
        handlers = [signal.getsignal(signum) for signum in (signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM)]
        with pytest.raises(RuntimeError, match="fails here"):
            chat(Watched(window, {3: fail}), lambda _: "on and on").answer("?")
        assert termios.tcgetattr(window.fd) == before
        assert [signal.getsignal(signum) for signum in (signal.SIGTSTP, signal.SIGCONT, signal.SIGTERM)] == handlers


STOPPED = """
import signal, sys
from ktransformers.cli.chat.terminal_keys import muted_keys
with muted_keys(0):
    print("muted", flush=True)
    sys.stdin.buffer.raw.read(1)
    signal.raise_signal(signal.{signal})
    print("back", flush=True)
    sys.stdin.buffer.raw.read(1)
"""


@pytest.fixture
def keys() -> Iterator[Window]:
    with open_window() as window:
        yield window


def has_echo(window: Window) -> bool:
    return bool(termios.tcgetattr(window.fd)[3] & termios.ECHO)


@contextmanager
def start_muted(window: Window, name: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", STOPPED.format(signal=name)],
        stdin=window.fd,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
        cwd=Path(__file__).parent.parent.parent,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "muted\n"
            assert not has_echo(window)
            window.type(b"x")
            yield process
        finally:
            process.kill()


def test_stopped_and_continued(keys: Window) -> None:
    with start_muted(keys, "SIGTSTP") as process:
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        assert has_echo(keys)  # the shell's turn
        process.send_signal(signal.SIGCONT)
        assert process.stdout is not None
        assert process.stdout.readline() == "back\n"
        assert not has_echo(keys)
        keys.type(b"x")
        assert process.wait() == 0
    assert has_echo(keys)


def test_ended_by_a_signal(keys: Window) -> None:
    with start_muted(keys, "SIGTERM") as process:
        assert process.wait() == -signal.SIGTERM
    assert has_echo(keys)


class Recorded(Terminal):
    """The program in a window of 24 rows and 80 columns. Keeps what it wrote."""

    def __init__(self, *flags: str, program: Sequence[str] = PROGRAM):
        super().__init__(*flags, program=program)
        set_size(self._fd)
        self.raw = ""

    def expect(self, text: str) -> str:
        before = super().expect(text)
        self.raw += before + text
        return before


@pytest.mark.exhaustive
def test_keys_and_ctrl_c_in_the_program() -> None:
    """What is typed ahead is not shown in the answer; Ctrl-C takes it along."""
    terminal = Recorded()
    try:
        terminal.expect("loading fake_chat.py")
        terminal.expect(">>>")
        terminal.type("endless\r")
        terminal.expect("on and on on and on")
        terminal.type("ghost\rcount\r")
        terminal.expect("on and on")
        terminal.type("\x03")
        terminal.expect("stopped")
        terminal.expect(">>>")
        terminal.type("count\r")
        terminal.expect("2 turns")
        terminal.expect(">>>")
        terminal.type("\x04")
        assert terminal.exit_code() == 0
    finally:
        terminal.close()
    rows = screen_of(terminal.raw)
    assert not [row for row in rows if "ghost" in row or "^C" in row or "loading" in row]
    begin, end = rows.index(">>> endless"), rows.index("stopped")
    said = "".join(row + " " for row in rows[begin + 1 : end])
    assert ("on and on " * 1000).startswith(said.rstrip())


def screen_of(raw: str) -> list[str]:
    """The rows that somebody would see."""
    screen = MemoryScreen()
    pyte.Stream(screen).feed(raw)
    return [row.rstrip() for row in screen.rows()]


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("count\r", ">>> count"),
        ("count\n", ">>> count"),
        ("cou", ">>> cou"),
        ("wörter 你好\r", ">>> wörter 你好"),
        ("first\rcount\r", "3 turns"),
        ("abc\x7f\x7f\x7fcount\r", ">>> count"),
    ],
)
def test_what_is_typed_during_an_answer_appears_at_the_next_prompt(typed: str, shown: str) -> None:
    terminal = Recorded()
    try:
        terminal.expect(">>>")
        terminal.type("long\r")
        terminal.expect("word word")
        terminal.type(typed)
        terminal.expect("the end")  # nothing of it stands in the answer
        terminal.expect("\r\n")
        before = screen_of(terminal.raw)
        assert not [row for row in before if "count" in row or "first" in row or "cou" in row]
        while shown not in "\n".join(screen_of(terminal.raw)):
            terminal.raw += terminal.rest()
    finally:
        terminal.close()


@pytest.mark.exhaustive
def test_what_is_typed_while_the_model_loads_is_the_first_question() -> None:
    terminal = Recorded()
    try:
        terminal.expect("loading fake_chat.py")
        terminal.type("hello there\r")
        terminal.expect("you said hello there")
        terminal.expect(">>>")
    finally:
        terminal.close()
    assert ">>> hello there" in screen_of(terminal.raw)


@pytest.mark.exhaustive
def test_ctrl_z_stops_the_program_at_the_prompt_and_in_an_answer() -> None:
    """In an interactive shell, whose job the chat is: without one the system ignores Ctrl-Z."""
    terminal = Recorded(program=["bash", "--norc", "--noprofile", "-i"])
    try:
        terminal.type(f"PS1='shell''> '; {shlex.join(PROGRAM)}\r")
        terminal.expect(">>>")
        terminal.type("half a ques")
        terminal.expect("half a ques")
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.expect("shell> ")
        terminal.type("echo al''ive\r")  # the terminal is the shell's again
        terminal.expect("alive\r\n")
        terminal.expect("shell> ")
        terminal.type("fg\r")
        terminal.expect("half a ques")
        terminal.type("tion\r")
        terminal.expect("you said half a question")
        terminal.expect(">>>")
        terminal.type("endless\r")
        terminal.expect("on and on")
        terminal.type("\x1a")
        terminal.expect("Stopped")
        terminal.expect("shell> ")
        terminal.type("fg\r")
        terminal.expect("on and on")
        terminal.type("\x03")
        terminal.expect("stopped")
        terminal.expect(">>>")
        terminal.type("\x04")
        terminal.expect("shell> ")
    finally:
        terminal.type("\x03exit\r")
        terminal.close()


# --- what takes time -------------------------------------------------------------------------------------------------


def test_progress_of_reading_is_erased() -> None:
    with open_window() as window:
        chat(terminal_view(window, delay=0), lambda _: "the answer").answer("a question of some length")
    assert re.search(rb"\r\xe2\xa0\x8b reading 44 tokens\x1b\[K", window.raw)
    assert b" reading 16 of 44 tokens\x1b[K" in window.raw
    assert window.screen.rows()[0].rstrip() == "the answer"
    assert "reading" not in "".join(window.screen.rows())
    dumb = io.StringIO()
    TerminalView(dumb, 0, {"TERM": "dumb"}, delay=0).reading(1, 2)
    assert dumb.getvalue() == ""


def test_status_line_is_drawn_while_nobody_reports() -> None:
    drawn = threading.Event()

    class Out(io.StringIO):
        def write(self, text: str) -> int:
            if threading.current_thread() is not threading.main_thread():
                drawn.set()
            return super().write(text)

    out = Out()
    status = StatusLine(out, lambda: 10, delay=1e-3)
    status.show("a text that is too long")
    assert drawn.wait(TIMEOUT)
    status.clear()
    status.clear()
    assert re.fullmatch(r"(\r. a text \x1b\[K)+\r\x1b\[K", out.getvalue())
    quick = StatusLine(out, lambda: 10, delay=NEVER)
    length = len(out.getvalue())
    quick.show("x")
    quick.clear()
    assert len(out.getvalue()) == length


EARLY = """
import contextlib, sys
import ktransformers.cli.loading as loading
from ktransformers.cli import main

@contextlib.contextmanager
def early_line(err, text):
    print(text, "torch" in sys.modules, "transformers" in sys.modules)
    raise SystemExit(0)
    yield

loading.early_line = early_line
main(["chat"])
"""


def test_a_line_before_the_slow_imports() -> None:
    root = Path(__file__).parent.parent.parent
    found = subprocess.run([sys.executable, "-c", EARLY], cwd=root, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"loading demo\S+ \.\.\. False False\n", found.stdout)
