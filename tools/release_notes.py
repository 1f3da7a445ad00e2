"""Prints the section of CHANGELOG.md that a tag is about, having checked that the tag is the package's version.

python tools/release_notes.py v0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

__all__ = ["notes_of", "section"]

ROOT = Path(__file__).resolve().parents[1]


def section(changelog: str, version: str) -> str:
    """The text from the dated heading of a version to the next heading. Raises ValueError for no heading or no text."""
    heading = rf"(?m)^## \[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}$"
    parts = re.split(heading, changelog)
    if len(parts) != 2:
        raise ValueError(f"CHANGELOG.md needs one heading `## [{version}] - YYYY-MM-DD`, and has {len(parts) - 1}")
    text = re.split(r"(?m)^## ", parts[1])[0].strip()
    if not text:
        raise ValueError(f"CHANGELOG.md says nothing of {version}")
    return text


def notes_of(tag: str, root: Path = ROOT) -> str:
    """The notes of a release. Raises ValueError when the tag is not `v` and the version of the package."""
    package = (root / "ktransformers" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'(?m)^__version__ = "([^"]+)"$', package)
    version = found[1] if found else ""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and ktransformers/__init__.py says {version}: call the tag v{version}")
    return section((root / "CHANGELOG.md").read_text(encoding="utf-8"), version)


if __name__ == "__main__":
    try:
        print(notes_of(sys.argv[1]))
    except ValueError as error:
        sys.exit(f"error: {error}")
