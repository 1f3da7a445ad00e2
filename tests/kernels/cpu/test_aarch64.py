"""The tiers of aarch64, by a cross compiler and an emulator: tiers/compare.cpp runs every family of kernels on each."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
EMULATED = ROOT / "build" / "aarch64"  # see tools/aarch64/python.sh
MISSING = [name for name in ("cmake", COMPILER, EMULATOR) if shutil.which(name) is None]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, *options: str) -> Path:
    """Compile the program with CMake, and return where it is."""
    run("cmake", "-S", ROOT, "-B", folder, "-DKTRANSFORMERS_COMPARE=ON", *options)
    run("cmake", "--build", folder, "--parallel", "2")
    return folder / "compare_tiers"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if MISSING:
        pytest.skip(f"{', '.join(MISSING)} missing: apt-get install cmake g++-aarch64-linux-gnu qemu-user")
    options = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={COMPILER}"]
    return build(tmp_path_factory.mktemp("aarch64"), *options)


def tiers(output: str) -> dict[str, str]:
    """What is said of each tier."""
    return dict(line.split(": ", 1) for line in output.splitlines() if ": " in line)


def test_neon_has_the_bits_of_scalar(program: Path) -> None:
    found = tiers(run(EMULATOR, "-cpu", "max", program))
    assert set(found) == {"scalar", "neon_dotprod", "neon_i8mm"}
    assert len(set(found.values())) == 1
    assert found["scalar"].endswith(" 0 wrong")


def test_a_processor_without_dot_products_takes_the_scalar_tier(program: Path) -> None:
    assert set(tiers(run(EMULATOR, "-cpu", "cortex-a72", program))) == {"scalar"}


@pytest.mark.exhaustive
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compares with x86-64")
def test_the_bits_are_those_of_x86(program: Path, tmp_path: Path) -> None:
    here, there = (run(*command).splitlines()[-1] for command in ([build(tmp_path)], [EMULATOR, program]))
    assert here.startswith("digest ")
    assert here == there


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not EMULATED.is_dir(), reason="tools/aarch64/python.sh build/aarch64 was never run")
def test_the_bundled_model_answers() -> None:
    """The whole program, with torch, on an emulated processor."""
    chat = [ROOT / "tools" / "aarch64" / "python.sh", EMULATED, "-m", "ktransformers.cli", "chat", "--temperature", "0"]
    done = subprocess.run(chat, input="What is 17 + 25?\n", capture_output=True, text=True, check=False)
    assert "17 + 25 = 42." in done.stdout, done.stderr
