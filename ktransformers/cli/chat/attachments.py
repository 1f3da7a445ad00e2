"""Files that a prompt names with `@path`: their text follows the question, pictures stand before it. A picture's path
alone, as a terminal pastes it for a file that is dropped there, is enough. Knows no terminal and no model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ktransformers.cli.chat.input import read_text_file
from ktransformers.errors import ConfigError, FormatError, reason_of
from ktransformers.media.limits import MAX_NBYTES, begins_as_picture
from ktransformers.system.file_kinds import read_head
from ktransformers.system.user_files import read_named

__all__ = ["MENTION_START", "Attached", "attach_files", "fenced", "names_files", "read_picture_file", "with_document"]

MENTION_START = r"(?<![A-Za-z0-9_@./])@"
"""Not after a letter: an @ inside of a word belongs to an address. Scripts without spaces may stand before it."""

# Quotes allow spaces.
_MENTION = re.compile(MENTION_START + r"""(?:"(?P<quoted>[^"\n]+)"|(?P<plain>[^\s"@]\S*))""")
# As terminals paste a path: in quotes, with backslashes before spaces, or bare.
_PASTED = re.compile(
    r"""(?<!\S)(?:'(?P<single>[~/][^'\n]+)'|"(?P<double>[~/][^"\n]+)"|(?P<bare>[~/](?:\\.|[^\s\\])+))(?!\S)"""
)
_MOST_LOOKED_UP = 64
_BACKTICKS = re.compile(r"`{3,}")
_AFTER_A_PATH = "?.,;:!)]}>'\"`"  # what a sentence puts behind a path, and letters that are not ASCII
_ENDS_A_PATH = re.compile(r"""[,;)\]}>'"`]|[^\x00-\x7f]""")  # of these, what a sentence can go on after


def fenced(text: str, language: str = "") -> str:
    """Return `text` in a fenced block that nothing in it can close."""
    longest = max((len(found) for found in _BACKTICKS.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"


def with_document(prompt: str, document: str) -> str:
    """Return a prompt and, in a fenced block below it, the document that it is about."""
    return f"{prompt}\n\n{fenced(document)}" if document else prompt


def _file(name: str) -> tuple[str, Path] | None:
    """The longest file that `name` begins with, as it is spelled and as it is opened; a sentence goes on after it."""
    name = name[:4096]  # no path is longer
    while name:
        path = Path(os.path.expanduser(name))
        if "\0" not in name and os.path.isfile(path):
            return name, path
        if name[-1] in _AFTER_A_PATH or not name[-1].isascii():
            name = name[:-1]
        else:
            name = name[: max((found.start() for found in _ENDS_A_PATH.finditer(name)), default=0)]
    return None


def _size(text: str) -> str:
    """What the user needs to know of it: will it fit?"""
    lines = text.count("\n") + 1
    return f"{lines:,} line{'s' * (lines > 1)}, {len(text):,} character{'s' * (len(text) > 1)}"


@dataclass(frozen=True, slots=True)
class Attached:
    """A prompt with its files. text: below it those of text files. pictures: encoded, in the order of their names."""

    text: str
    pictures: tuple[bytes, ...] = ()


def read_picture_file(path: Path) -> bytes | None:
    """Return the bytes of a file that begins as a picture does, None for others. Raises ConfigError for one that cannot
    be read."""
    try:
        if not begins_as_picture(read_head(path)):
            return None
        data = read_named(path, MAX_NBYTES + 1)
    except FormatError:  # which whoever reads it as text will say
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {reason_of(error)}") from error
    if len(data) > MAX_NBYTES:
        raise ConfigError(f"the picture {path} has more than {MAX_NBYTES} bytes")
    return data


def _pasted_pictures(text: str) -> dict[Path, bytes]:
    """Pictures whose paths stand in a prompt by themselves."""
    found = dict[Path, bytes]()
    for paste in _PASTED.finditer(text):
        name = paste["single"] or paste["double"] or re.sub(r"\\(.)", r"\1", paste["bare"])
        path = Path(os.path.expanduser(name[:4096]))
        if "\0" not in name and os.path.isfile(path) and (data := read_picture_file(path)) is not None:
            found[path] = data
    return found


def names_files(text: str) -> bool:
    """Whether `attach_files` would attach a file for one of the first mentions of `text`."""
    mentions = islice(_MENTION.finditer(text), _MOST_LOOKED_UP)
    return any(_file(mention["quoted"] or mention["plain"]) is not None for mention in mentions)


def attach_files(text: str, note: Callable[[str], None]) -> Attached:
    """Return `text`, below it the text of each file that it names with `@path`, and the pictures that it names.

    note: gets a line for each text. `@name` stays text when there is no such file. Raises ConfigError for files that
    are no text or too large.
    """
    blocks: dict[Path, str] = {}
    pictures = _pasted_pictures(text)
    for mention in _MENTION.finditer(text):
        name = mention["quoted"] or mention["plain"]
        found = _file(name)
        if found is None:
            if mention["quoted"] or "/" in name:  # meant as a path, most likely
                reason = "is a folder" if os.path.isdir(os.path.expanduser(name)) else "is no file here"
                note(f"{name} {reason}: nothing is attached for it")
            continue
        name, path = found
        if path not in pictures and (data := read_picture_file(path)) is not None:
            pictures[path] = data
        if path not in blocks and path not in pictures:
            content = read_text_file(path, "attached")
            blocks[path] = f"{name}:\n{fenced(content, path.suffix[1:] if path.suffix[1:].isalnum() else '')}"
            note(f"attached {name}, {_size(content.rstrip())}")
    return Attached("\n\n".join([text, *blocks.values()]), tuple(pictures.values()))
