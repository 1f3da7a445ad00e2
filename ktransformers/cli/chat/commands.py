"""The commands of a chat: /help, /clear and so on. Each works on the running ChatLoop."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.cli.chat.settings import PARAMETERS
from ktransformers.engine.sequence.session_file import SUFFIX
from ktransformers.errors import ConfigError, FormatError
from ktransformers.system.file_kinds import is_safetensors, read_head

if TYPE_CHECKING:
    from ktransformers.cli.chat.loop import ChatLoop

__all__ = ["COMMANDS", "Command", "bound_command", "find_command"]

_LIKE_A_COMMAND = re.compile(r"/[A-Za-z]+!?\Z")


_KEYS = {
    '"""': "opens and closes a prompt of several lines",
    "@FILE": "in a prompt: the file's text, or a picture, is added",
    "a file's path": "as the prompt: its text, or picture, is the prompt",
    "Alt-Enter": "begins a new line of the prompt",
    "Tab": "completes commands and paths",
    "Up, Ctrl-R": "recall and search earlier prompts",
    "Ctrl-C": "stops the answer; at the prompt clears the line",
    "Ctrl-D": "leaves",
}


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the chat. help: usages with a line each, for /help; run gets what stands after the command's name.

    words: what its first argument can be, and for each what can follow it; takes_path: it is a path. For completion.
    """

    names: tuple[str, ...]
    help: Mapping[str, str]
    run: Callable[[ChatLoop, str], None]
    words: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    takes_path: bool = False


def _help(chat: ChatLoop, argument: str) -> None:
    lines = [line for command in _ALL for line in command.help.items()]
    chat.view.note("\n".join(f"{usage:<27}{help}".rstrip() for usage, help in [*lines, *_KEYS.items()]))


def _clear(chat: ChatLoop, argument: str) -> None:
    chat.conversation.clear()
    chat.view.note("the conversation is cleared")


def _system(chat: ChatLoop, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "off" else _unquoted(argument)
    _show_system(chat)


def _unquoted(text: str) -> str:
    for quotes in ('"""', '"', "'"):
        if len(text) > 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)]
    return text


def _path(argument: str, usage: str) -> Path:
    if not argument or "\0" in argument:
        raise ConfigError(f"usage: {usage}")
    return Path(os.path.expanduser(_unquoted(argument)))


def _save(chat: ChatLoop, argument: str) -> None:
    path = _path(argument, "/save FILE")
    if os.path.isfile(path):
        if not chat.is_interactive:
            raise ConfigError(f"{path} exists; /save! {argument} overwrites it")
        if not chat.source.confirm(f"{path} exists. Overwrite it?"):
            chat.view.note("not saved")
            return
    _save_over(chat, argument)


def _save_over(chat: ChatLoop, argument: str) -> None:
    path = _path(argument, "/save! FILE")
    if path.suffix.lower() == SUFFIX:
        chat.save_session(path)
        return
    chat.conversation.save(path)
    chat.view.note(f"saved {len(chat.conversation.messages)} messages to {path}")


def _load(chat: ChatLoop, argument: str) -> None:
    path = _path(argument, "/load FILE")
    if path.suffix.lower() == SUFFIX or (path.is_file() and is_safetensors(_head(path))):
        chat.load_session(path)
        return
    chat.conversation.load(path)
    chat.view.note(f"loaded {len(chat.conversation.messages)} messages from {path}")


def _head(path: Path) -> bytes:
    """The first bytes of a file; none where it cannot be read, which whoever reads the rest will say."""
    try:
        return read_head(path)
    except FormatError:
        return b""


def _stats(chat: ChatLoop, argument: str) -> None:
    chat.view.note(chat.describe_stats())


def _exit(chat: ChatLoop, argument: str) -> None:
    chat.is_finished = True


def _regenerate(chat: ChatLoop, argument: str) -> None:
    chat.regenerate()


def _edit(chat: ChatLoop, argument: str) -> None:
    chat.edit()


def _set_parameter(chat: ChatLoop, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        raise ConfigError(f"usage: /set parameter NAME VALUE, with NAME one of {', '.join(PARAMETERS)}")
    chat.view.note(chat.settings.set_parameter(name, value.strip()))


def _set_system(chat: ChatLoop, argument: str) -> None:
    if not argument:
        raise ConfigError("usage: /set system TEXT")
    _system(chat, argument)


def _set_history(chat: ChatLoop, is_on: bool) -> None:
    chat.source.record_history(is_on)
    chat.view.note(f"prompts are {'kept' if is_on else 'not kept'} for later sessions")


def _set_thinking(chat: ChatLoop, is_on: bool) -> None:
    chat.settings.set_thinking(is_on)
    chat.view.note(f"thinking is {'on' if is_on else 'off'}")


def _show_system(chat: ChatLoop) -> None:
    system = chat.conversation.system
    chat.view.note("there is no system prompt" if system is None else f"system prompt: {system}")


def _show_parameters(chat: ChatLoop) -> None:
    chat.view.note(f"{chat.settings.describe_parameters()}\n{'thinking':<20}{chat.settings.describe_thinking()}")


def _show_model(chat: ChatLoop) -> None:
    chat.view.note(chat.describe_model())


def _show_template(chat: ChatLoop) -> None:
    chat.view.note(chat.describe_template())


def _show_all(chat: ChatLoop) -> None:
    for show in (_show_model, _show_parameters, _show_system):
        show(chat)


_Setter = Callable[["ChatLoop", str], None]
_SET: dict[str, _Setter] = {
    "parameter": _set_parameter,
    "system": _set_system,
    "history": lambda chat, argument: _set_history(chat, True),
    "nohistory": lambda chat, argument: _set_history(chat, False),
    "think": lambda chat, argument: _set_thinking(chat, True),
    "nothink": lambda chat, argument: _set_thinking(chat, False),
}
_SHOW: dict[str, Callable[[ChatLoop], None]] = {
    "info": _show_all,
    "model": _show_model,
    "parameters": _show_parameters,
    "system": _show_system,
    "template": _show_template,
}


def _one_of(word: str, known: Mapping[str, object], usage: str) -> str:
    """`word`, which must be known. Raises ConfigError that names the nearest."""
    if word in known:
        return word
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise ConfigError(f"unknown {usage} {word}; {hint}" if word else f"usage: {usage} {'|'.join(known)}")


def _set(chat: ChatLoop, argument: str) -> None:
    word, _, rest = argument.partition(" ")
    rest = rest.strip()
    setter = _SET[_one_of(word, _SET, "/set")]
    if rest and word not in ("parameter", "system"):
        raise ConfigError(f"/set {word} takes nothing more, got {rest!r}")
    setter(chat, rest)


def _show(chat: ChatLoop, argument: str) -> None:
    _SHOW[_one_of(argument or "info", _SHOW, "/show")](chat)


_ALL = (
    Command(("/help", "/?"), {"/help, /?": "show this"}, _help),
    Command(("/regen",), {"/regen": "answer the last question again, with another seed"}, _regenerate),
    Command(("/edit",), {"/edit": "change the last question; its answer is replaced"}, _edit),
    Command(("/clear",), {"/clear": "forget the conversation; the system prompt stays"}, _clear),
    Command(("/system",), {"/system [TEXT]": "show or set the system prompt; off: none"}, _system, {"off": ()}),
    Command(
        ("/set",),
        {
            "/set parameter NAME VALUE": "temperature, top_p, max_tokens, stop, ...",
            "/set system TEXT": "the same as /system TEXT",
            "/set think|nothink": "whether the model thinks before it answers",
            "/set history|nohistory": "whether prompts are kept for later sessions",
        },
        _set,
        {word: tuple(PARAMETERS) if word == "parameter" else () for word in _SET},
    ),
    Command(("/show",), {f"/show {'|'.join(_SHOW)}": ""}, _show, dict.fromkeys(_SHOW, ())),
    Command(
        ("/save",),
        {"/save FILE": f"write the conversation ({SUFFIX}: the cache too)"},
        _save,
        takes_path=True,
    ),
    Command(("/save!",), {"/save! FILE": "the same, overwriting without asking"}, _save_over, takes_path=True),
    Command(("/load",), {"/load FILE": "go on with a saved conversation"}, _load, takes_path=True),
    Command(("/stats",), {"/stats": "counts and rates of this chat, use of the cache"}, _stats),
    Command(("/bye", "/exit", "/quit"), {"/bye, /exit, /quit": "leave; exit and quit do it too"}, _exit),
)

COMMANDS: dict[str, Command] = {name: command for command in _ALL for name in command.names}
"""Commands by the names that the user types."""


def find_command(text: str) -> tuple[Command, str] | None:
    """Return the command in `text` and its argument, None when it is a prompt.

    Raises ConfigError for an unknown command.
    """
    name, _, argument = text.partition(" ")
    if name in COMMANDS:
        return COMMANDS[name], argument.strip()
    if not _LIKE_A_COMMAND.match(name):
        return None
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    raise ConfigError(
        f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else "/help lists the commands")
    )


def bound_command(text: str) -> Callable[[ChatLoop], None] | None:
    """Return the command in `text` bound to its argument, as a ChatLoop runs it; None when it is a prompt."""
    found = find_command(text)
    if found is None:
        return None
    command, argument = found
    return lambda chat: command.run(chat, argument)
