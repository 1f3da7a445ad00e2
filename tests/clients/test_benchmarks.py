"""guidellm and llama-benchy, four requests each: every one is answered, and what they count is what they asked for."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.servers.server_process import ServerProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

SECONDS = 180.0  # for a busy machine; each takes two to twelve
NUM_REQUESTS, NUM_TOKENS = 4, 12


@pytest.fixture(scope="module")
def run(interpreter_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """run(program, *arguments): what a program of the environment says. It finds no model hub and an empty home."""
    programs = interpreter_of("benchmarks", ("torch",)).parent
    settings = {"HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1"}
    settings["GUIDELLM__MAX_WORKER_PROCESSES"] = "1"  # each imports torch

    def run(program: str, *arguments: str) -> str:
        command = [str(programs / "python"), str(programs / program), *arguments]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | settings,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


@pytest.mark.parametrize(
    ("route", "is_streamed"),
    [
        ("/v1/chat/completions", True),
        ("/v1/chat/completions", False),
        ("/v1/completions", True),
        ("/v1/responses", True),
    ],
)
def test_guidellm(
    run: Callable[..., str], service: ServerProcess, tmp_path: Path, route: str, is_streamed: bool
) -> None:
    report = tmp_path / "report.json"
    run(
        "guidellm",
        "run",
        *("--backend", f"kind=openai_http,target={service.url},model=demo,request_format={route},stream={is_streamed}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=40,output_tokens={NUM_TOKENS}"),
        *("--tokenizer", f"kind=huggingface_auto,model={DEMO_CHECKPOINT}"),
        *("--output", f"kind=json,path={report}"),
        "--disable-console",
    )
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert not requests["incomplete"]
    assert len(requests["successful"]) == NUM_REQUESTS
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == NUM_TOKENS
        assert request["input_metrics"]["text_tokens"] >= 40
        assert request["output"]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[str]:
    """Where llama-benchy takes its prompts from."""
    (tmp_path / "book.txt").write_text("It was a bright cold day in April. " * 800, encoding="utf-8")
    handler: Any = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/book.txt"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("latency_mode", ["api", "generation"])
def test_llama_benchy(
    run: Callable[..., str], service: ServerProcess, tmp_path: Path, book: str, latency_mode: str
) -> None:
    report = tmp_path / "report.json"
    said = run(
        "llama-benchy",
        *("--base-url", f"{service.url}/v1", "--model", "demo", "--tokenizer", str(DEMO_CHECKPOINT)),
        *("--pp", "64", "--tg", str(NUM_TOKENS), "--exact-tg", "--runs", "2", "--concurrency", "2"),
        *("--latency-mode", latency_mode, "--book-url", book, "--skip-coherence", "--exit-on-first-fail"),
        *("--format", "json", "--save-result", str(report)),
    )
    assert "rror" not in said
    (benchmark,) = json.loads(report.read_text(encoding="utf-8"))["benchmarks"]
    assert len(benchmark["ttfr"]["values"]) == NUM_REQUESTS
    # Null where all tokens of an answer arrive in one piece.
    assert len(benchmark["tg_req_throughput"]["values"]) == NUM_REQUESTS
    # Of prompts that took no longer than the latency it measured and takes off, it gives none.
    slower = [time for time in benchmark["est_ppt"]["values"] if time > 0]
    assert len(benchmark["est_ppt"]["values"]) == NUM_REQUESTS
    assert len((benchmark["pp_req_throughput"] or {"values": []})["values"]) == len(slower)
