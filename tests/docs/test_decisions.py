"""Pages of decisions are short and have the same four parts; the glossary has one entry for a term."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.named import ROOT

FOLDER = ROOT / "docs" / "decisions"
PAGES = sorted(page for page in FOLDER.glob("*.md") if page.name != "README.md")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [pytest.param(page, id=page.stem) for page in PAGES])
def test_a_decision_has_four_parts_and_fits_on_a_screen(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"(?m)^\*\*(.+?)\.\*\*", text) == ["Context", "Decision", "What lost", "Consequences"]
    assert text.startswith("# ")
    assert len(text.splitlines()) <= 30


def entries() -> list[str]:
    return re.findall(r"(?m)^\| \*\*(.+?)\*\* \|", GLOSSARY)


def test_the_glossary_is_one_term_a_thing_in_order() -> None:
    terms = entries()
    assert 60 <= len(terms) <= 100
    assert len(set(terms)) == len(terms)
    assert terms == sorted(terms, key=str.lower)


def test_words_with_several_meanings_say_which() -> None:
    """And what the others are called."""
    section = GLOSSARY.partition("## One word, several things")[2].partition("\n## ")[0]
    assert {"tier", "planes", "stage", "slot", "group", "plan"} <= set(re.findall(r"(?m)^\| (\w+) \|", section))


def test_names_in_the_glossary_exist() -> None:
    """Of classes, as docs spell them: `ForwardContext`."""
    classes = set(re.findall(r"`([A-Z][a-z]\w*[A-Z]\w*)`", GLOSSARY))
    assert len(classes) >= 10
    found = set()
    for path in (ROOT / "ktransformers").rglob("*.py*"):
        if path.suffix in (".py", ".pyi"):
            text = path.read_text(encoding="utf-8")
            found |= classes & set(re.findall(r"(?m)(?:^ *class | import \w+ as )(\w+)", text))
    assert classes - found == set()


def test_places_in_the_glossary_exist() -> None:
    places = re.findall(r"`((?:[a-z_]+/)+[\w.]+)`", GLOSSARY)
    assert len(places) > 60
    assert [
        place for place in places if not any((root / place).exists() for root in (ROOT, ROOT / "ktransformers"))
    ] == []
