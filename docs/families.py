"""Writes the part of docs/models.md that says which families run, from ktransformers/models/families.py.

python -m docs.families        # or make families
"""

from __future__ import annotations

from pathlib import Path

from ktransformers.models.families import FAMILY_SUPPORT, Refusal, Support

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- families: written by `make families` -->", "<!-- end of families -->"


def families_text() -> str:
    """The part of the page, without its marks."""
    refusals: dict[Refusal, list[str]] = {}
    for name, support in FAMILY_SUPPORT.items():
        if isinstance(support, Refusal):
            refusals.setdefault(support, []).append(name)
    rows = sorted((refusal.means, _names(names)) for refusal, names in refusals.items())
    return "\n".join(
        [
            f"**Tested in detail** ({_count(Support.TESTED)}): {_of(Support.TESTED)}.",
            "",
            f"**Tested as tiny models, and each model compared while it is loaded** ({_count(Support.CHECKED)}): "
            f"{_of(Support.CHECKED)}.",
            "",
            f"**Refused** ({len(FAMILY_SUPPORT) - _count(Support.TESTED) - _count(Support.CHECKED)}):",
            "",
            "| because | families |",
            "|---|---|",
            *(f"| {means} | {names} |" for means, names in rows),
        ]
    )


def page_with(text: str, page: str) -> str:
    """The page with another text between the marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def _count(support: Support) -> int:
    return sum(one is support for one in FAMILY_SUPPORT.values())


def _of(support: Support) -> str:
    return _names([name for name, one in FAMILY_SUPPORT.items() if one is support])


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


if __name__ == "__main__":
    PAGE.write_text(page_with(families_text(), PAGE.read_text()))
