"""Answers about pictures go on when the engine, what decodes, or the whole server is killed: real processes."""

from __future__ import annotations

import base64
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.api.test_chat_with_pictures import drawing, folder_of, png
from tests.server.test_state_dir import kill
from tests.support.pictures.speaking import let_speak
from tests.support.servers.server_process import ServerProcess

NUM_TOKENS = 400
FIRST = 30  # events that a client has read when something is killed
BACKENDS = ("balance_serve", "ktransformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return let_speak(folder_of("qwen3_vl", tmp_path_factory.mktemp("seeing") / "tiny")[0])


def body(width: int) -> dict[str, Any]:
    """width: of the picture."""
    url = f"data:image/png;base64,{base64.b64encode(png(drawing(width))).decode()}"
    image = {"type": "image_url", "image_url": {"url": url}}
    content = [image, {"type": "text", "text": "What is this?"}]
    turns = [{"role": "user", "content": content}]
    return {"messages": turns, "temperature": 0, "max_tokens": NUM_TOKENS, "stream": True}


def pieces(lines: Iterator[str]) -> Iterator[str]:
    for line in takewhile(lambda line: line != "data: [DONE]", lines):
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or ""


def answer(url: str, width: int, after: Callable[[], None] | None = None) -> str:
    """after: called once, in the middle of the answer."""
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body(width), timeout=120) as response:
        assert response.status_code == 200, response.read()
        for number, piece in enumerate(pieces(response.iter_lines())):
            text += piece
            if number == FIRST and after is not None:
                after()
    return text


def kill_child(process: ServerProcess, module: str) -> None:
    """SIGKILL to the child process of the server that runs a module, the first that was started."""
    threads = Path(f"/proc/{process.process.pid}/task").glob("*/children")
    children = sorted(int(pid) for thread in threads for pid in thread.read_text().split())
    pid = next(pid for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text())
    end = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([end], [], [])  # what is asked before it has ended ends with it
    os.close(end)


def test_the_engine_and_what_decodes_are_killed(folder: Path) -> None:
    with ServerProcess(str(folder), "--backend_type", "balance_serve", "--cache_lens", "2048") as process:
        alone = answer(process.url, 90)
        assert len(alone) == NUM_TOKENS
        assert answer(process.url, 90, lambda: kill_child(process, "engine_process")) == alone
        assert any("running requests will go on" in line for line in process.log)
        kill_child(process, "reader_process")
        assert len(answer(process.url, 180)) == NUM_TOKENS  # another picture, which is to be decoded
        assert not any("tensors for" in line for line in process.log)  # the tower is not left unread


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.exhaustive
def test_the_whole_server_is_killed(folder: Path, tmp_path: Path, backend: str) -> None:
    flags = ("--backend_type", backend, "--cache_lens", "2048", "--state_dir", str(tmp_path / "state"))
    with ServerProcess(str(folder), *flags) as process:
        headers = {"x-kt-keep": "600", "x-request-id": "mine"}
        chat = f"{process.url}/v1/chat/completions"
        with httpx.stream("POST", chat, json=body(90), headers=headers, timeout=120) as response:
            begun = pieces(response.iter_lines())
            text = "".join(next(begun) for _ in range(FIRST))
            kill(process)
    with ServerProcess(str(folder), *flags) as process:
        with httpx.stream("GET", f"{process.url}/v1/requests/mine/stream", timeout=120) as response:
            whole = "".join(pieces(response.iter_lines()))
        assert whole.startswith(text)
        assert whole == answer(process.url, 90)
        assert any("1 requests go on where they were before the restart, 0 do not" in line for line in process.log)
