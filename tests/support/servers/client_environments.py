"""Environments of client programs that cannot live with each other, nor with what the tests need.

Each is built once from a file of pins, or from a package-lock.json, in the cache folder of pytest, and found there by
later runs.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["environment", "is_unreachable", "node_modules"]

BUILD_SECONDS = 600.0
_UNREACHABLE = (
    r"(?i)failed to (fetch|download)|error sending request|dns error|connection (refused|reset)|timed out"
    r"|no matching distribution|name resolution"
)
_NPM_UNREACHABLE = r"npm error code (ENOTFOUND|ECONNREFUSED|ECONNRESET|ETIMEDOUT|EAI_AGAIN|ENETUNREACH|E5\d\d)"


def environment(pins: Path, cache: Path, behind: tuple[str, ...] = ()) -> Path:
    """Its interpreter. pins: exact versions, as `uv pip compile` writes them. behind: packages of ours to be found too.

    Skips the test where uv is missing or the registry is not reachable; any other failure is raised.
    """
    uv = pytest.importorskip("uv", reason="environments of clients are built by uv; pip install uv").find_uv_bin()
    # Whatever the environment is made of, so that a change builds another.
    made_of = [pins.read_text(encoding="utf-8"), sys.version, sys.executable, *behind]
    folder = cache / f"{pins.stem}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:12]}"
    interpreter, mark = folder / "bin" / "python", folder / "complete"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{pins.stem}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # processes of pytest-xdist share the cache
        if mark.exists():
            return interpreter
        for old in cache.glob(f"{pins.stem}-*"):
            shutil.rmtree(old)
        _run(uv, "venv", "--no-config", "--python", sys.executable, str(folder))
        _run(
            uv,
            "pip",
            "install",
            "--no-config",
            "--system-certs",
            "--python",
            str(interpreter),
            "--no-deps",
            "-r",
            str(pins),
        )
        _add_behind(folder, behind)
        mark.touch()
    return interpreter


def node_modules(packages: Path, cache: Path) -> Path:
    """The node_modules folder of package.json and package-lock.json in the folder `packages`; their scripts do not run.

    Skips the test where node or npm is missing or the registry is not reachable; any other failure is raised.
    """
    npm = shutil.which("npm")
    if npm is None or shutil.which("node") is None:
        pytest.skip("needs node 20 and npm")
    files = [packages / "package.json", packages / "package-lock.json"]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    name = f"node-{packages.name}"
    folder = cache / f"{name}-{digest}"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            for old in cache.glob(f"{name}-*"):
                shutil.rmtree(old)
            folder.mkdir()
            for file in files:
                shutil.copy(file, folder)
            _run(npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder))
            (folder / "complete").touch()
    return folder / "node_modules"


def is_unreachable(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether uv, pip or npm failed for want of a registry."""
    return done.returncode != 0 and re.search(f"{_UNREACHABLE}|{_NPM_UNREACHABLE}", done.stderr) is not None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    if done.returncode == 0:
        return
    if is_unreachable(done):
        pytest.skip(f"the package registry is not reachable: {done.stderr[-300:]}")
    raise AssertionError(f"{' '.join(command)} failed:\n{done.stderr}")


def _add_behind(folder: Path, packages: tuple[str, ...]) -> None:
    """The folders where this interpreter has `packages` come last on the environment's path."""
    specs = [importlib.util.find_spec(package) for package in packages]
    found = {str(Path(spec.origin).parents[1]) for spec in specs if spec is not None and spec.origin is not None}
    (site,) = (folder / "lib").glob("python3*/site-packages")
    (site / "behind.pth").write_text("".join(f"{line}\n" for line in sorted(found)), encoding="utf-8")
