"""Writes the tables of flags in docs/server.md and docs/chat.md, from the parsers of `serve` and `chat`, and the list
of block types in README.md, from the table of weight types.

python -m docs.flag_tables        # or make flags
"""

from __future__ import annotations

import argparse
from pathlib import Path
from textwrap import wrap

from ktransformers.cli import build_parser
from ktransformers.cli.parsing.parser import leaves
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import FORK_TYPES

__all__ = ["PAGES", "TYPES_MARKS", "TYPES_PAGE", "flags_text", "page_with", "types_text"]

FOLDER = Path(__file__).parent
PAGES = {"serve": FOLDER / "server.md", "chat": FOLDER / "chat.md"}
"""The page of each command."""

FLAGS_MARKS = ("<!-- flags: written by `make flags` -->", "<!-- end of flags -->")

TYPES_PAGE = FOLDER.parent / "README.md"
TYPES_MARKS = ("<!-- types: written by `make flags` -->", "<!-- end of types -->")


def parser_of(command: str) -> argparse.ArgumentParser:
    """Raises ValueError for a command that there is not."""
    found = [parser for parser in leaves(build_parser()) if parser.prog == f"ktransformers {command}"]
    if len(found) != 1:
        raise ValueError(f"no command is called {command}")
    return found[0]


def flags_text(command: str) -> str:
    """A table for each group of flags, as `--help` has them. `chat` has those alone that `serve` has not."""
    known = {option for action in parser_of("serve")._actions for option in action.option_strings}
    lines: list[str] = []
    for group in parser_of(command)._action_groups:
        actions = [action for action in group._group_actions if action.option_strings and action.help]
        if command != "serve":
            actions = [action for action in actions if not known.issuperset(action.option_strings)]
        if actions:
            lines += [f"**{_cell(group.title or '')}**", "", "| flag | |", "|---|---|", *map(_row, actions), ""]
    return "\n".join(lines).rstrip()


def _row(action: argparse.Action) -> str:
    """argparse's `%(default)s` and `%%` become what `--help` prints."""
    help_text = (action.help or "") % (vars(action) | {"prog": "ktransformers"})
    value = f" {action.metavar}" if isinstance(action.metavar, str) else ""
    if not value and action.nargs != 0:
        value = " " + "|".join(map(str, action.choices)) if action.choices else ""
    spellings = " ".join(f"`{option}{_cell(value)}`" for option in action.option_strings)
    return f"| {spellings} | {_cell(help_text)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def types_text() -> str:
    """The block types that are packed, in the order of the table, those of forks by themselves."""
    plain = [record.name for number, record in FORMATS.items() if record.is_packed and number not in FORK_TYPES]
    forks = [FORMATS[number].name for number in sorted(FORK_TYPES)]
    return "\n".join(wrap(f"Block types: {', '.join(plain)}; of ik_llama.cpp {', '.join(forks)}.", 119))


def page_with(text: str, page: str, marks: tuple[str, str] = FLAGS_MARKS) -> str:
    """The page with another text between the marks. Raises ValueError for a page without them."""
    begin, end = marks
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


if __name__ == "__main__":
    for name, path in PAGES.items():
        path.write_text(page_with(flags_text(name), path.read_text(encoding="utf-8")), encoding="utf-8")
    readme = TYPES_PAGE.read_text(encoding="utf-8")
    TYPES_PAGE.write_text(page_with(types_text(), readme, TYPES_MARKS), encoding="utf-8")
