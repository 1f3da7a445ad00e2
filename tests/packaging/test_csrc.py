"""csrc: folders include one way only, and none has more than 25 files."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"

# What a file of a folder may include, besides its own folder. simd and kernels are compiled together, for each tier.
BELOW = {
    "runtime": set[str](),
    "simd": {"runtime"},
    "kernels": {"runtime"},
    "tiers": {"kernels", "simd", "runtime"},
    "ops": {"tiers", "runtime"},
    "bind": {"ops", "tiers", "runtime"},
}


def includes(folder: Path) -> Iterator[tuple[str, str]]:
    """(a file, what it includes of csrc) under csrc."""
    for file in sorted(folder.rglob("*")):
        if file.suffix in (".h", ".cpp", ".inl"):
            for name in re.findall(r'^\s*#\s*include\s+"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
                yield str(file.relative_to(folder)), name


def against_the_order(found: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
    wrong = []
    for file, name in found:
        own, included = file.split("/")[0], name.split("/")[0]
        if included != own and included not in BELOW[own]:
            wrong.append((file, name))
    return wrong


def test_includes_point_one_way() -> None:
    found = list(includes(CSRC))
    assert len(found) > 150
    assert against_the_order(iter(found)) == []
    assert {file.split("/")[0] for file, _ in found} <= set(BELOW)


def test_includes_name_files_that_there_are() -> None:
    assert [(file, name) for file, name in includes(CSRC) if not (CSRC / name).is_file()] == []


@pytest.mark.parametrize(
    ("file", "text", "wrong"),
    [
        ("runtime/pool.h", '#include "ops/linear/linear.h"\n', True),
        ("ops/linear/linear.cpp", '#include "bind/args.h"\n', True),
        ("kernels/rows.inl", '#include "tiers/isa.h"\n', True),
        ("simd/avx2.h", '#include "kernels/rows.inl"\n', True),
        ("bind/bind.cpp", '#include "ops/linear/linear.h"\n#include <vector>\n', False),
    ],
)
def test_an_include_against_the_order_is_seen(tmp_path: Path, file: str, text: str, wrong: bool) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(text)
    assert bool(against_the_order(includes(tmp_path))) is wrong


def test_no_folder_is_crowded() -> None:
    folders = [CSRC, *(one for one in CSRC.rglob("*") if one.is_dir())]
    assert {str(one): count for one in folders if (count := sum(file.is_file() for file in one.iterdir())) > 25} == {}


# An enum of a KT_NAMED_ENUM, where its list stands, and a program with the switch over its kinds.
SWITCHES = [
    ("KT_ACTIVATIONS", "runtime/types.h", '#include "simd/scalar.h"\n#include "kernels/common/math.inl"\n'),
    ("KT_SCORINGS", "ops/experts/routing.h", '#include "ops/experts/routing.cpp"\n'),
]


@pytest.mark.parametrize(("kinds", "header", "program"), SWITCHES)
def test_a_kind_that_the_kernels_forget_does_not_compile(kinds: str, header: str, program: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no compiler")
    flags = ["-std=c++17", "-fsyntax-only", "-Wall", "-Werror=switch"]
    assert "-Werror=switch" in (CSRC.parent / "CMakeLists.txt").read_text(encoding="utf-8")
    text = (CSRC / header).read_text(encoding="utf-8")
    forgotten = re.sub(rf"(#define {kinds}\(KIND\) *\\\n)", r'\1  KIND(Forgotten, "FORGOTTEN") \\\n', text)
    assert forgotten != text
    for name, header_text in (("as_it_is", text), ("forgotten", forgotten)):
        folder = tmp_path / name
        (folder / header).parent.mkdir(parents=True)
        (folder / header).write_text(header_text)
        (folder / "program.cpp").write_text(program)
        command = [compiler, *flags, "-I", str(folder), "-I", str(CSRC), str(folder / "program.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode != 0) == (name == "forgotten"), done.stderr
        assert ("Forgotten" in done.stderr) == (name == "forgotten")
