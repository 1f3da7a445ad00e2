"""The output of each measurement: a table line by line as figures come, then a line of JSON. Imports nothing heavy."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Column", "FigureTable", "Record", "Row", "print_record"]

Row = dict[str, Any]
"""One figure, in JSON types."""

Record = dict[str, Any]
"""A whole measurement, in JSON types. With `is_failed` true the command's exit code is 1."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: the value of a row called `key`, as `spec` formats it, below `title` (the key, if empty)."""

    key: str
    width: int
    spec: str = ""
    title: str = ""

    def cell(self, row: Row) -> str:
        """Return a row's value right-aligned; a dash for None, and for what the row does not have."""
        value = row.get(self.key)
        return f"{'-' if value is None else format(value, self.spec):>{self.width}}"


class FigureTable:
    """A table that prints its head at once, and each row as it is added. rows: all of them."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns, self.rows = columns, list[Row]()
        print(" ".join(f"{one.title or one.key:>{one.width}}" for one in columns), flush=True)

    def add(self, row: Row, **shown: object) -> None:
        """Print a row and keep it. shown: values of columns that only the table has."""
        print(" ".join(one.cell(row | shown) for one in self._columns), flush=True)
        self.rows.append(row)


def print_record(name: str, is_json: bool, measure: Callable[[], Record], output: Path | None = None) -> int:
    """Measure, then print the record as one line, the last on standard output. Returns the exit code.

    is_json: the record only; what is printed meanwhile goes to standard error. output: a file that the line is appended
    to as well, as files of results have it.
    """
    with _table_beside_json(is_json):
        record = measure()
    line = json.dumps({"bench": name} | record)
    print(line, flush=True)
    if output is not None:
        with output.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 1 if record.get("is_failed") else 0


def _table_beside_json(is_json: bool) -> AbstractContextManager[object]:
    """While it is open, what is printed goes to standard error if only the record is wanted on standard output."""
    return contextlib.redirect_stdout(sys.stderr) if is_json else contextlib.nullcontext()
