"""The pages for users: links and anchors lead somewhere, and flags that answers name are flags."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")


def anchors(text: str) -> set[str]:
    """As GitHub makes them of headings: lower case, no punctuation, hyphens for spaces; -1, -2 for repeated ones."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"(?m)^#{1,6} +(.+?) *#*$", FENCE.sub("", text)):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found | set(re.findall(r"""<a (?:name|id)=["']([^"']+)""", text))


def links(text: str) -> Iterator[str]:
    """Those into this repository."""
    plain = re.sub(r"`[^`\n]*`", "``", FENCE.sub("", text))
    for target in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", plain):
        if not re.match(r"[a-z][a-z+.-]*:", target):
            yield target


def broken(page: Path) -> list[str]:
    return [target for target in links(page.read_text(encoding="utf-8")) if not leads_somewhere(page, target)]


def leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    if not file.exists():
        return False
    return not anchor or file.suffix != ".md" or anchor in anchors(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES])
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    assert broken(page) == []


def test_what_leads_nowhere_is_found(tmp_path: Path) -> None:
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    other.write_text("# A title, `code` & more\n## Twice\n## Twice\n```\n# no heading\n```\n", encoding="utf-8")
    right = "[a](other.md) [b](other.md#a-title-code--more) [c](other.md#twice-1) [d](#here)"
    others = "[e](https://example.com#x) `[f](no.md)`"
    wrong = ["no.md", "other.md#twice-2", "other.md#no-heading", "#nowhere"]
    page.write_text(f"# Here\n{right} {others}\n" + " ".join(f"[x]({one})" for one in wrong), encoding="utf-8")
    assert broken(page) == wrong


@pytest.mark.parametrize("folder", ["docs", "docs/design", "docs/decisions"])
def test_every_page_is_in_the_index(folder: str) -> None:
    """That of its folder, in one row; README.md of docs leads to those of the other folders."""
    index = ROOT / folder / "README.md"
    rows = re.findall(r"(?m)^\| \[[^]]+\]\(([^)]+)\)", index.read_text(encoding="utf-8"))
    assert len(set(rows)) == len(rows)
    listed = {target for target in links(index.read_text(encoding="utf-8")) if "/" not in target}
    assert listed == {page.name for page in (ROOT / folder).glob("*.md")} - {"README.md"}
    main = set(links((ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert folder == "docs" or f"{Path(folder).name}/README.md" in main


NARROW = [
    *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(
        ROOT / "docs" / f"{name}.md"
        for name in ("server", "serving_guide", "conversations", "gpu", "structure", "glossary")
    ),
    *(ROOT / "docs" / "design").glob("*.md"),
    *(ROOT / "docs" / "decisions").glob("*.md"),
]


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in NARROW])
def test_lines_are_narrow(page: Path) -> None:
    """Rows of tables and code, which cannot be wrapped, excepted."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    assert [line for line in text.splitlines() if len(line) > 120 and not line.lstrip().startswith("|")] == []
