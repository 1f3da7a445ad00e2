"""README's Limits deny nothing that a flag does."""

from __future__ import annotations

import re

import pytest

from ktransformers.cli import build_parser
from ktransformers.cli.parsing.parser import leaves
from tests.docs.named import ROOT

DENIALS = {
    r"tensor.parallel(?:ism)?": "tensor_parallel",
    r"pipelines?|across machines|spans? machines|several machines": "pipeline|stage_hosts",
    r"replicas?|cluster": "cluster|replicas",
    r"(?:nothing|experts?) moves?|on one device": "hot_experts",
    r"speculat\w+|draft\w*|multi-token": r"(?:num_)?(?:draft|speculative|mtp)\w*",
    r"lora|adapters?": r"lora\w*|adapter\w*",
    r"images?|pictures?|vision": r"mmproj|image\w*|vision\w*",
    r"audio|sound|speech": r"audio\w*",
}
"""What a limit may deny, as people say it, and the flags that would do it."""


def flags() -> set[str]:
    """Of every command, with underscores and without dashes in front."""
    options = {option for parser in leaves(build_parser()) for option in parser._option_string_actions}
    return {option[2:].replace("-", "_") for option in options if option.startswith("--")}


def limits(page: str) -> list[str]:
    """A line for each item of the list."""
    section = page.partition("## Limits\n")[2].partition("\n## ")[0]
    section = re.sub(r"\[([^]]*)\]\([^)]*\)", "", section)  # links say where there is more
    return [" ".join(item.split()) for item in section.split("\n- ") if item.strip()]


def denied(limit: str) -> list[str]:
    """The sentences, or parts of them, that say what there is not."""
    return re.findall(r"(?i)\b(?:no|not|never|nothing|only|cannot|on one device)\b[^.;]*", limit)


def false_denials(page: str, known: set[str]) -> list[str]:
    found = []
    for part in (part for limit in limits(page) for part in denied(limit)):
        if "`--" in part:
            continue  # it says which flag does it
        for words, pattern in DENIALS.items():
            wrong = sorted(flag for flag in known if re.fullmatch(pattern, flag))
            if wrong and re.search(rf"(?i)\b(?:{words})\b", part):
                found.append(f"{part}: --{wrong[0]}")
    return found


def test_limits_deny_no_flag() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(limits(page)) > 4
    assert false_denials(page, flags()) == []


def test_flags_in_limits_are_flags() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    named = {flag for limit in limits(page) for flag in re.findall(r"--(\w+)", limit)}
    assert named
    assert named <= flags()


@pytest.mark.parametrize(
    "limit",
    [
        "Several GPUs hold layers in turn; there is no tensor parallelism.",
        "Linux only, and nothing spans machines.",
        "A layer's experts are on one device.",
        "Weights are fixed; nothing moves between RAM and video memory.",
        "No replicas.",
    ],
)
def test_what_the_page_once_said_is_found(limit: str) -> None:
    assert false_denials(f"# A\n## Limits\n\n- {limit}\n\n## B\n", flags()) != []


def test_a_limit_that_becomes_a_flag_is_found() -> None:
    page = "# A\n## Limits\n\n- Text only: no images.\n- No speculative decoding, no LoRA.\n"
    assert false_denials(page, {"port"}) == []
    assert len(false_denials(page, {"lora", "mmproj", "draft_model"})) >= 3
