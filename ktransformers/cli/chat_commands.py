"""The commands of a chat: /help, /clear and so on. Each works on the running ChatLoop."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from ktransformers.cli.chat_loop import ChatLoop

__all__ = ["COMMANDS", "Command", "find_command"]

_LIKE_A_COMMAND = re.compile(r"/[A-Za-z]+\Z")


@dataclass(frozen=True, slots=True)
class Command:
    """usage and help are shown by /help; run gets what stands after the command's name."""

    usage: str
    help: str
    run: Callable[[ChatLoop, str], None]


def _help(chat: ChatLoop, argument: str) -> None:
    lines = [f"{command.usage:<16}{command.help}" for command in COMMANDS.values()]
    lines += [
        f"{chr(34) * 3:<16}opens and closes a prompt of several lines",
        f"{'a file path':<16}typed as the prompt: the file's text is the prompt",
        f"{'Ctrl-C':<16}stops the answer; twice at the prompt, or Ctrl-D, leaves",
    ]
    chat.view.note("\n".join(lines))


def _clear(chat: ChatLoop, argument: str) -> None:
    chat.conversation.clear()
    chat.view.note("the conversation is cleared")


def _system(chat: ChatLoop, argument: str) -> None:
    if argument:
        chat.conversation.system = None if argument == "off" else argument
    system = chat.conversation.system
    chat.view.note("there is no system prompt" if system is None else f"system prompt: {system}")


def _path(argument: str, usage: str) -> Path:
    if not argument:
        raise ConfigError(f"usage: {usage}")
    return Path(os.path.expanduser(argument))


def _save(chat: ChatLoop, argument: str) -> None:
    path = _path(argument, "/save FILE")
    chat.conversation.save(path)
    chat.view.note(f"saved {len(chat.conversation.messages)} messages to {path}")


def _load(chat: ChatLoop, argument: str) -> None:
    path = _path(argument, "/load FILE")
    chat.conversation.load(path)
    chat.view.note(f"loaded {len(chat.conversation.messages)} messages from {path}")


def _stats(chat: ChatLoop, argument: str) -> None:
    chat.view.note(chat.describe_stats())


def _exit(chat: ChatLoop, argument: str) -> None:
    chat.is_finished = True


COMMANDS: dict[str, Command] = {
    "/help": Command("/help", "show this", _help),
    "/clear": Command("/clear", "forget the conversation; the system prompt stays", _clear),
    "/system": Command("/system [TEXT]", "show or set the system prompt; 'off' removes it", _system),
    "/save": Command("/save FILE", "write the conversation as JSON", _save),
    "/load": Command("/load FILE", "go on with a saved conversation", _load),
    "/stats": Command("/stats", "show counts and rates of this chat, and how full the cache is", _stats),
    "/exit": Command("/exit", "leave", _exit),
}


def find_command(text: str) -> tuple[Command, str] | None:
    """The command in `text` and its argument, None when it is a prompt. Raises ConfigError for an unknown command."""
    name, _, argument = text.partition(" ")
    if name in COMMANDS:
        return COMMANDS[name], argument.strip()
    if not _LIKE_A_COMMAND.match(name):
        return None
    near = difflib.get_close_matches(name, COMMANDS, n=1)
    raise ConfigError(
        f"unknown command {name}; " + (f"did you mean {near[0]}?" if near else "/help lists the commands")
    )
