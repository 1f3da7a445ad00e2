"""KTRANSFORMERS_TIERS: which instruction sets a build compiles, and with which level of optimization the scalar one."""

from __future__ import annotations

import json
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
X86 = platform.machine() in ("x86_64", "AMD64")

pytestmark = [
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
    pytest.mark.skipif(not X86, reason="names tiers of x86"),
]


def configure(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), f"-DPython_EXECUTABLE={sys.executable}"]
    command += ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def levels(folder: Path) -> dict[str, set[str]]:
    """The levels of optimization that each tier's files are compiled with; the last one on a command line counts."""
    found: dict[str, set[str]] = {}
    for entry in json.loads((folder / "compile_commands.json").read_text()):
        name = re.search(r'KT_NAME=\\*"?\\*"?(\w+)', entry["command"])
        if name:
            found.setdefault(name[1], set()).add(re.findall(r" (-O\w)", entry["command"])[-1])
    return found


def test_all_tiers(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKTRANSFORMERS_TIERS=all")
    assert done.returncode == 0, done.stderr
    found = levels(tmp_path)
    assert {"scalar", "avx2", "avx_vnni", "avx512_vnni"} <= set(found)
    assert found.pop("scalar") == {"-O1"}
    assert all(level == {"-O3"} for level in found.values())


def test_the_tiers_of_this_machine_are_what_it_would_choose(tmp_path: Path) -> None:
    """By the processor's flags as Linux tells them, the way that the build does not go."""
    done = configure(tmp_path)
    assert done.returncode == 0, done.stderr
    flags = set(re.search(r"^flags\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)[1].split())  # type: ignore[index]
    found = set(levels(tmp_path))
    if "avx512_vnni" not in flags:
        best = {"avx_vnni"} if "avx_vnni" in flags else {"avx2"} if "avx2" in flags else set()
        assert found == {"scalar"} | best
        return
    assert {"scalar", "avx512_vnni"} <= found
    assert "avx2" not in found
    assert not {"avx512_bf16", "amx"} <= found
    if "avx512_bf16" not in flags:
        assert "avx512_bf16" not in found
    if "amx_int8" not in flags:
        assert "amx" not in found


def test_the_scalar_tier_is_fast_where_it_is_all_there_is(tmp_path: Path) -> None:
    """A compiler that says that this processor has no SIMD unit."""
    compiler = shutil.which("c++")
    assert compiler
    stand_in = tmp_path / "c++"
    stand_in.write_text(f'#!/bin/sh\ncase "$*" in *-march=native*) exit 0 ;; esac\nexec {compiler} "$@"\n')
    stand_in.chmod(0o755)
    done = configure(tmp_path / "build", f"-DCMAKE_CXX_COMPILER={stand_in}")
    assert done.returncode == 0, done.stderr
    assert levels(tmp_path / "build") == {"scalar": {"-O3"}}


def test_another_word_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "-DKTRANSFORMERS_TIERS=avx2")
    assert done.returncode != 0
    assert "KTRANSFORMERS_TIERS=avx2 is not known; it is native or all" in " ".join(done.stderr.split())
