"""Prints how many lines of each package the tests ran, thinnest first, from coverage.py's JSON report.

python tools/coverage_by_package.py build/coverage/coverage.json        # make coverage
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import PurePosixPath
from typing import Any

__all__ = ["by_package", "table"]


def by_package(report: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """{package: (lines that ran, lines)} of a report; a package has the files that lie in its folder, not below it."""
    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in report["files"].items():
        package = PurePosixPath(name).parent.as_posix().replace("/", ".")
        counts[package][0] += file["summary"]["covered_lines"]
        counts[package][1] += file["summary"]["num_statements"]
    return {package: (ran, lines) for package, (ran, lines) in counts.items() if lines}


def table(packages: dict[str, tuple[int, int]]) -> str:
    """A line for each package, the least covered first, and one for all of them. Raises ValueError for none."""
    if not packages:
        raise ValueError("the report has no file of the package: were the tests run from the repository's root?")
    rows = sorted(packages.items(), key=lambda row: (row[1][0] / row[1][1], row[0]))
    total = tuple(map(sum, zip(*packages.values(), strict=True)))
    width = max(len(package) for package, _ in rows)
    lines = [f"{'package':{width}}    lines      ran"]
    for package, (ran, count) in [*rows, ("all", total)]:
        lines.append(f"{package:{width}} {count:8,} {ran / count:8.0%}")
    return "\n".join(lines)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        print(table(by_package(json.load(file))))
