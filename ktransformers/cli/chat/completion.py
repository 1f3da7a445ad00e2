"""Completion by Tab in the chat's prompt: commands, their arguments, and paths. Knows no model."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from ktransformers.cli.chat.attachments import MENTION_START
from ktransformers.cli.chat.commands import COMMANDS, Command

__all__ = ["ChatCompleter"]

_MENTION = re.compile(MENTION_START + r"""(?:"(?P<quoted>[^"\n]*)|(?P<plain>[^\s"@]*))\Z""")
_LIKE_A_PATH = re.compile(r"(~|\.{1,2})?/")


class ChatCompleter(Completer):
    """Completes commands, arguments and paths of a chat from the text before the cursor."""

    def __init__(self) -> None:
        self._files = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterator[Completion]:
        """Yield the completions of the text before the cursor, as prompt_toolkit's Completer asks for them."""
        text = document.text_before_cursor
        mention = _MENTION.search(text)
        if mention is not None:
            yield from self._mentioned(mention, complete_event)
            return
        if "\n" in text:
            return
        name, space, argument = text.partition(" ")
        names = {known: bool(one.words) or one.takes_path for known, one in COMMANDS.items() if known.startswith(text)}
        if space and name in COMMANDS:
            command = COMMANDS[name]
            if command.takes_path:
                yield from self._paths(argument, complete_event)
            yield from _arguments(argument, command)
        elif names and text:
            yield from _words(text, names)
        elif _LIKE_A_PATH.match(text):
            yield from self._paths(text, complete_event)

    def _mentioned(self, mention: re.Match[str], event: CompleteEvent) -> Iterator[Completion]:
        """Paths after an @. One with a space is put into quotes."""
        path = mention["quoted"] if mention["quoted"] is not None else mention["plain"]
        is_quoted = mention["quoted"] is not None
        for found in self._paths(path, event):
            whole = path + found.text
            if not is_quoted and " " in whole:
                yield Completion(f'"{whole}', start_position=-len(path), display=found.display)
            else:
                yield found

    def _paths(self, prefix: str, event: CompleteEvent) -> Iterator[Completion]:
        """Files and folders; a folder ends with a slash, so that the next Tab looks into it."""
        for found in self._files.get_completions(Document(prefix), event):
            is_folder = os.path.isdir(os.path.expanduser(prefix + found.text))
            yield Completion(found.text + "/" * is_folder, start_position=0, display=found.display)


def _words(typed: str, words: Mapping[str, bool]) -> Iterator[Completion]:
    """The words that begin as typed. Each says whether something can follow it, which a space makes ready for."""
    for word, takes_more in words.items():
        if word.startswith(typed):
            yield Completion(word + " " * takes_more, start_position=-len(typed), display=word)


def _arguments(typed: str, command: Command) -> Iterator[Completion]:
    first, space, rest = typed.partition(" ")
    if not space:
        yield from _words(first, {word: bool(command.words[word]) for word in command.words})
    elif " " not in rest:
        yield from _words(rest, dict.fromkeys(command.words.get(first, ()), True))
