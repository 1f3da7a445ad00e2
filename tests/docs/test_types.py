"""Weight types: docs say those of the table, and sources take them from one place."""

from __future__ import annotations

import re

from docs.flag_tables import TYPES_MARKS, TYPES_PAGE, page_with, types_text
from ktransformers.kernels.cpu import PACKED_TYPES
from ktransformers.kernels.triton.quant.repack import GPU_TYPES
from ktransformers.kernels.types import QuantType
from tests.docs.named import ROOT

GGUF_ENUM = "GGML" + "QuantizationType"


def test_the_list_in_the_readme_is_up_to_date() -> None:
    """If this fails: make flags"""
    page = TYPES_PAGE.read_text(encoding="utf-8")
    assert page_with(types_text(), page, TYPES_MARKS) == page
    named = set(re.findall(r"\w+", types_text()))
    assert {qtype for qtype in QuantType if qtype.name in named} == PACKED_TYPES


def test_types_that_a_gpu_repacks_are_in_the_docs() -> None:
    (row,) = re.findall(r"^\| (.*?) matrices, FP8", (ROOT / "docs/gpu.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(row.split(", ")) == {qtype.name for qtype in GPU_TYPES}


def test_one_module_alone_knows_the_enum_of_the_gguf_package() -> None:
    """Members of it and of QuantType are equal, so that `is` between the two is false without a word."""
    folders = ("ktransformers", "benchmarks", "docs", "examples", "tests", "tools")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert len(sources) > 500
    naming = {path.relative_to(ROOT).as_posix() for path in sources if GGUF_ENUM in path.read_text(encoding="utf-8")}
    assert naming == {"ktransformers/kernels/types.py"}
