"""Flags, variables, commands, rule files and operators: docs name those that there are, and all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.flag_tables import PAGES, flags_text, page_with
from ktransformers.cli import build_parser
from ktransformers.cli.parsing.foreign_flags import FOREIGN_FLAGS
from ktransformers.cli.parsing.parser import leaves
from ktransformers.optimize.aliases import OPERATOR_ALIASES
from ktransformers.system.shipped_rules import RULES_DIR
from tests.docs.named import ROOT, pages

OTHERS = {
    "docker": "add_host build cpus entrypoint gpus image ipc name network rm ulimit",
    "pip": "config_settings find_links force_reinstall index_url no_deps no_index version platform",
    "ray and numactl": "address cpunodebind head membind num_cpus resources",
    "pytest": "exhaustive random_cases",
    "scripts of this repository": (
        "backend check checkpoint count drafts gpus minutes skills smoke steps table tokenizer weights whole"
    ),
    "benchmarks of this repository": (
        "between_us drafter folder from kv_types limits peer_format read_ahead streams texts tokens tune types"
    ),
    "vLLM, Claude Code, node": "enable_prompt_tokens_details preload from_file system_prompt",
}
"""Flags of other programs that commands in docs use, without those that command lines here read as ours."""


def named(text: str) -> set[str]:
    return {flag.replace("-", "_") for flag in re.findall(r"(?<![\w-])--([a-zA-Z][\w-]*)", text)}


def ours() -> dict[str, set[str]]:
    """{flag: commands}, with underscores and without dashes in front."""
    found: dict[str, set[str]] = {}
    for parser in leaves(build_parser()):
        for option in parser._option_string_actions:
            if option.startswith("--"):
                found.setdefault(option[2:].replace("-", "_"), set()).add(parser.prog)
    return found


def foreign() -> set[str]:
    names = {name.lstrip("-") for flag in FOREIGN_FLAGS for name in flag.names}
    return {name.replace("-", "_") for name in names}


@pytest.mark.parametrize("page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages()])
def test_flags_are_flags(page: Path) -> None:
    known = set(ours()) | foreign() | {flag for flags in OTHERS.values() for flag in flags.split()}
    assert named(page.read_text(encoding="utf-8")) - known == set()


def test_flags_of_others_are_used() -> None:
    said = set().union(*(named(page.read_text(encoding="utf-8")) for page in pages()))
    assert {flag for flags in OTHERS.values() for flag in flags.split()} <= said


def test_every_flag_of_a_user_is_in_docs() -> None:
    """Both spellings of a switch count as one. Of `bench` its commands are, whose flags `--help` lists."""
    said = set().union(*(named(page.read_text(encoding="utf-8")) for page in pages()))
    missing = {
        f"{parser.prog}: {action.option_strings[0]}"
        for parser in leaves(build_parser())
        if not parser.prog.startswith("ktransformers bench ")
        for action in parser._actions
        if action.help and action.option_strings and not said & named(" ".join(action.option_strings))
    }
    assert missing == set()


def test_every_command_is_in_docs() -> None:
    text = " ".join(page.read_text(encoding="utf-8") for page in pages())
    commands = {parser.prog.removeprefix("ktransformers ") for parser in leaves(build_parser())}
    bench = {command.removeprefix("bench ") for command in commands if command.startswith("bench ")}
    others = {command for command in commands if not command.startswith("bench ")}
    assert {name for name in bench if not re.search(rf"`{name}`|bench {name}\b", text)} == set()
    assert {name for name in others if not re.search(rf"ktransformers {name}\b|`{name}`", text)} == set()


@pytest.mark.parametrize("command", PAGES)
def test_tables_of_flags_are_those_of_the_command_line(command: str) -> None:
    page = PAGES[command].read_text(encoding="utf-8")
    assert page_with(flags_text(command), page) == page, "a table of flags is older than its parser; run `make flags`"


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no <!-- flags"):
        page_with("text", "# A page\n")
    with pytest.raises(ValueError, match="no command is called swim"):
        flags_text("swim")


def variables_in_docs() -> set[str]:
    text = " ".join(page.read_text(encoding="utf-8") for page in pages())
    return set(re.findall(r"\bKTRANSFORMERS_([A-Z][A-Z_]*[A-Z])\b", text))


def test_variables_exist() -> None:
    """One for each flag, MODEL and CONFIG; one of our own; those of the build."""
    build = set(re.findall(r"\bKTRANSFORMERS_([A-Z]+)\b", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8")))
    assert "WERROR" in build
    known = (
        {flag.upper() for flag in ours()} | {"MODEL", "CONFIG", "ISA"} | build | {"TEST_CONTAINER", "KEY"}
    )  # of a test; of a client
    assert variables_in_docs() - known - {"FLAG"} == set()


def test_variables_that_the_code_reads_are_in_docs() -> None:
    read = set()
    for path in (ROOT / "ktransformers").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        read |= set(re.findall(r"(?:environ|getenv)[^\n]{0,20}[\"']KTRANSFORMERS_([A-Z_]+)[\"']", text))
    for path in (ROOT / "csrc").rglob("*"):
        if path.is_file():
            read |= set(re.findall(r"getenv\(\"KTRANSFORMERS_([A-Z_]+)\"", path.read_text(encoding="utf-8")))
    assert "ISA" in read
    assert read <= variables_in_docs()


def test_rule_files_exist() -> None:
    """docs/rules.md has each of them (tests/optimize/test_rule_files.py); here: what any page names by its path."""
    shipped = {path.name for path in RULES_DIR.rglob("*.yaml")}
    assert len(shipped) > 10
    for page in pages():
        paths = re.findall(r"optimize_rules/((?:[\w-]+/)*[\w.-]+\.yaml)", page.read_text(encoding="utf-8"))
        assert [path for path in paths if not (RULES_DIR / path).is_file()] == [], page.name


def test_operators_are_those_of_the_rules() -> None:
    """The table of docs/rules.md names each operator that a rule can have, by one of its names, and no other."""
    page = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    table = page.partition("## Operators and ops")[2].partition("\n\n")[2].partition("\n\n")[0]
    first = [line.strip("| ").split(" | ")[0] for line in table.splitlines()[2:]]
    written = {f"ktransformers.operators.{name}" for cell in first for name in re.findall(r"`([\w.]+)`", cell)}
    assert len(written) > 20
    assert {name for name in written if name not in OPERATOR_ALIASES} == set()
    targets = {OPERATOR_ALIASES[name].rpartition(".")[2] for name in written}
    assert {target.rpartition(".")[2] for target in OPERATOR_ALIASES.values()} - targets == set()
