"""A real server process on loopback, for tests."""

from __future__ import annotations

import json
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

START_SECONDS = 120.0  # a deadline for a busy machine, not an expectation
MAIN = Path(__file__).resolve().parents[3] / "ktransformers" / "server" / "main.py"


class ServerProcess:
    """`server/main.py` with `flags` on a free port; ready when the constructor returns."""

    def __init__(self, *flags: str, wait: bool = True):
        command = [sys.executable, str(MAIN), "--port", "0", "--cpu_infer", "1", *flags]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        self._new: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.port = 0
        if wait:
            line = self.wait_for(r"serving .* on https?://127\.0\.0\.1:\d+/v1")
            self.port = int(line.rsplit(":", 1)[1].partition("/")[0])

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            self._new.put(line)
        self._new.put(None)

    def wait_for(self, pattern: str, seconds: float = START_SECONDS) -> str:
        """The next log line, among those not waited for yet, that `pattern` is found in."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._new.get(timeout=max(end - time.monotonic(), 0.01))
            except queue.Empty:
                line = None
            if line is None:
                raise AssertionError(f"no line with {pattern!r} in the server's log:\n{''.join(self.log)}")
            if re.search(pattern, line):
                return line

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def completion(self, body: dict[str, object], on_piece: Callable[[], object], request_id: str = "") -> str:
        """The text that /v1/completions streams for `body`. on_piece: called for every piece of it."""
        headers, text = {"x-request-id": request_id} if request_id else {}, ""
        url, body = f"{self.url}/v1/completions", {**body, "stream": True}
        with httpx.stream("POST", url, json=body, timeout=2 * START_SECONDS, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                    on_piece()
        return text

    def terminate(self, seconds: float = 60.0) -> int:
        """SIGTERM, then the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
