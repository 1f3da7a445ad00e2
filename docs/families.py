"""Writes the part of docs/models.md that says which families run, from ktransformers/models/families.py.

python -m docs.families        # or make families
"""

from __future__ import annotations

from pathlib import Path

from ktransformers.models.families import FAMILIES, NOT_IN_TRANSFORMERS, Refusal, Since, Support

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- families: written by `make families` -->", "<!-- end of families -->"


def families_text() -> str:
    """The part of the page, without its marks."""
    lines = [(name, *one) for name, line in sorted(FAMILIES.items()) for one in _by_version(line)]
    refusals: dict[Refusal, list[str]] = {}
    for name, support, when in lines:
        if isinstance(support, Refusal):
            refusals.setdefault(support, []).append(f"`{name}`{when}")
    rows = sorted((refusal.means, ", ".join(names)) for refusal, names in refusals.items())
    missing: dict[str, list[str]] = {}
    for name, lacks in NOT_IN_TRANSFORMERS.items():
        missing.setdefault(lacks, []).append(f"`{name}`")
    tested, checked = (
        [f"`{name}`{when}" for name, support, when in lines if support is kind]
        for kind in (Support.TESTED, Support.CHECKED)
    )
    return "\n".join(
        [
            f"**Tested in detail** ({len(tested)}): {', '.join(tested)}.",
            "",
            f"**Tested as tiny models, and each model compared while it is loaded** ({len(checked)}): "
            f"{', '.join(checked)}.",
            "",
            f"**Refused** ({sum(map(len, refusals.values()))}):",
            "",
            "| because | families |",
            "|---|---|",
            *(f"| {means} | {names} |" for means, names in rows),
            "",
            f"**Without a class in transformers** ({len(NOT_IN_TRANSFORMERS)}), and refused by name unless they bring "
            "code of their own and `--trust_remote_code` runs it:",
            "",
            "| lacks | families |",
            "|---|---|",
            *(f"| {lacks} | {', '.join(names)} |" for lacks, names in sorted(missing.items())),
        ]
    )


def _by_version(line: Support | Refusal | Since) -> list[tuple[Support | Refusal, str]]:
    """What is so, and in which versions of transformers."""
    if not isinstance(line, Since):
        return [(line, "")]
    version = ".".join(map(str, line.version))
    before = [] if line.before is None else [(line.before, f" (before {version})")]
    return [(line.then, f" (from {version})"), *before]


def page_with(text: str, page: str) -> str:
    """The page with another text between the marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(page_with(families_text(), PAGE.read_text()))
