"""A machine that gives a server too little says so in one line, before anything large is imported."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("limit", "value", "flag", "found"),
    [(resource.RLIMIT_NOFILE, 64, "ulimit -n", "64 files"), (resource.RLIMIT_AS, 1 << 30, "ulimit -v", "1.00 GiB")],
    ids=["files", "address space"],
)
def test_too_little_is_one_clear_line(limit: int, value: int, flag: str, found: str) -> None:
    code = (
        f"import resource; resource.setrlimit({limit}, ({value}, {value}))\n"
        "from ktransformers.cli import server_main as main; import sys; sys.exit(main(['--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (1, 1), done.stderr
    assert found in lines[0]
    assert flag in lines[0]
