"""The prompt at a terminal: editing, history, completion, and what the keys do. Knows no model."""

from __future__ import annotations

import sys

from prompt_toolkit import PromptSession
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import has_focus
from prompt_toolkit.history import History
from prompt_toolkit.input import Input
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import Output
from prompt_toolkit.shortcuts import CompleteStyle

from ktransformers.cli.chat.completion import ChatCompleter
from ktransformers.cli.chat.input import TurnSource, UserTurn, is_open_block, read_turn
from ktransformers.cli.chat.prompt_history import PromptHistory
from ktransformers.cli.chat.terminal_keys import drop_keys
from ktransformers.errors import ConfigError

__all__ = ["TerminalSource"]

_PLACEHOLDER = "Send a message (/help for commands)"


class TerminalSource(TurnSource):
    """A source of turns that are typed at a terminal. Pasted lines come as one turn.

    history: what the arrow keys recall.
    Ctrl-Z stops the program as a shell's job; `fg` brings the prompt back as it was.

    Ctrl-C clears what was typed; KeyboardInterrupt is raised when there was nothing, or a prefilled text. Ctrl-D on an
    empty line ends the input.
    """

    def __init__(self, history: History, keyboard: Input | None = None, screen: Output | None = None):
        """Make the prompt session. keyboard, screen: for tests; None takes the process's terminal."""
        self._history, self._prefilled = history, ""
        self._input, self._output = keyboard, screen
        self._session: PromptSession[str] = PromptSession(
            history=history,
            completer=ChatCompleter(),
            complete_while_typing=False,
            complete_style=CompleteStyle.READLINE_LIKE,
            placeholder=[("fg:ansibrightblack", _PLACEHOLDER)],
            multiline=True,
            enable_suspend=True,
            prompt_continuation="... ",
            key_bindings=self._keys(),
            input=keyboard,
            output=screen,
        )

    def read_turn(self) -> UserTurn | None:
        """Return the next typed turn; None at the end. Raises KeyboardInterrupt."""
        try:
            return read_turn(self._read)
        finally:
            self._prefilled = ""

    def _read(self, is_inside: bool) -> str | None:
        try:
            return self._session.prompt(">>> ", default=self._prefilled)
        except EOFError:
            return None

    def prefill(self, text: str) -> None:
        """Begin the next turn with `text`, for editing."""
        self._prefilled = text

    def confirm(self, question: str) -> bool:
        """Whether the user answers `question` with yes.

        Keys that were pressed before the question was there are no answer to it.
        """
        if self._input is None:
            drop_keys(sys.stdin.fileno())
        session: PromptSession[str] = PromptSession(input=self._input, output=self._output, enable_suspend=True)
        try:
            return session.prompt(f"{question} [y/N] ").strip().lower() in ("y", "yes")
        except (EOFError, KeyboardInterrupt):
            return False

    def record_history(self, is_on: bool) -> None:
        """Set whether prompts are written to the history from now on. Raises ConfigError where there is none."""
        if isinstance(self._history, PromptHistory):
            self._history.is_recording = is_on
        elif is_on:
            raise ConfigError("this chat began without a history (--no_history, or its file cannot be written)")

    def _keys(self) -> KeyBindings:
        keys = KeyBindings()
        is_typing = has_focus(DEFAULT_BUFFER)  # and not searching the history

        @keys.add("c-c", filter=is_typing)
        @keys.add("<sigint>", filter=is_typing)
        def clear(event: KeyPressEvent) -> None:
            if event.current_buffer.text and not self._prefilled:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt, style="class:aborting")

        @keys.add("enter", filter=is_typing)
        def send(event: KeyPressEvent) -> None:
            if is_open_block(event.current_buffer.text):
                event.current_buffer.insert_text("\n")
            else:
                event.current_buffer.validate_and_handle()

        @keys.add("escape", "enter", filter=is_typing)
        def break_line(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        return keys
