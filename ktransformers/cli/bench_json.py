"""`--json` of the bench commands: only their last line, the record, on standard output."""

from __future__ import annotations

import argparse
import contextlib
import sys
from contextlib import AbstractContextManager

__all__ = ["add_json_flag", "table_beside_json"]


def add_json_flag(parser: argparse._ActionsContainer) -> None:
    """Add --json."""
    parser.add_argument(
        "--json", action="store_true", help="only the JSON record on standard output; the table on standard error"
    )


def table_beside_json(is_json: bool) -> AbstractContextManager[object]:
    """While it is open, what is printed goes to standard error if only the record is wanted on standard output."""
    return contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext()
