"""What the libraries below a server say has the form of our own lines, instead of being a bare text."""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import asyncio, logging
from ktransformers.system.logs import set_up_logging
set_up_logging("info", with_time=True)
set_up_logging("info", with_time=True)  # twice is as once
{deed}
"""

FORGOTTEN = """
async def fail():
    raise ValueError("in nobody's task")
async def main():
    task = asyncio.ensure_future(fail())
    await asyncio.sleep(0)
    del task
asyncio.run(main())
"""
HANDLER = """
async def main():
    asyncio.get_running_loop().call_exception_handler({"message": "something broke"})
asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("deed", "line"),
    [
        (FORGOTTEN, "ERROR asyncio: Task exception was never retrieved"),
        (HANDLER, "ERROR asyncio: something broke"),
        ('logging.getLogger("uvicorn.error").warning("Invalid HTTP request")', "WARNING uvicorn.error: Invalid HTTP"),
        ('logging.getLogger("concurrent.futures").error("a callback failed")', "ERROR concurrent.futures: a callback"),
        ('logging.getLogger("ktransformers.x").info("hello")', "INFO ktransformers.x: hello"),
    ],
)
def test_lines_of_libraries(deed: str, line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE.replace("{deed}", deed)], capture_output=True, text=True, timeout=120, check=True
    )
    first = done.stderr.splitlines()[0]
    assert first[:2] == "20"  # the year
    assert line in first
    assert done.stderr.count(line) == 1
