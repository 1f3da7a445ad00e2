"""llama.cpp's server (llama-server of https://github.com/ggml-org/llama.cpp) as a peer of ours, over HTTP."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ktransformers.bench.servers.client import Client, RequestError
from ktransformers.errors import ConfigError, EngineError
from ktransformers.system.child import ending_with_parent

__all__ = ["LlamaServer", "LlamaServerWork", "find_llama_server", "llama_server_flags"]

_PROGRAM = "llama-server"
_ALL_LAYERS = 999
_START_SECONDS = 1800.0
_POLL_SECONDS = 0.2
_KEPT_LINES = 30
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class LlamaServerWork:
    """The llama-server to start: `program` with a GGUF, `slots` requests at a time, `context` tokens for all together.

    threads: of the CPU; 0 leaves that to llama.cpp. n_cpu_moe: so many layers have their routed experts on the CPU and
    all else is on the GPU; None leaves the placement to llama.cpp. more: further flags, which win over these.
    """

    program: str
    gguf_path: Path
    slots: int
    context: int
    threads: int = 0
    n_cpu_moe: int | None = None
    more: Sequence[str] = ()


def find_llama_server(given: Path | None) -> str:
    """Return the program to run: `given`, or llama-server on the PATH. Raises ConfigError when there is none to run."""
    found = shutil.which(_PROGRAM if given is None else str(given))
    if found is None:
        where = f"no {_PROGRAM} on the PATH" if given is None else f"--llama_server {given} is no program"
        raise ConfigError(f"{where}; build llama.cpp and name its bin/{_PROGRAM} with --llama_server PATH")
    return found


def llama_server_flags(work: LlamaServerWork) -> list[str]:
    """Return the flags of llama-server, without those for where it listens."""
    flags = ["-m", str(work.gguf_path), "-np", str(work.slots), "-c", str(work.context)]
    if work.threads:
        flags += ["-t", str(work.threads)]
    if work.n_cpu_moe is not None:
        flags += ["-ngl", str(_ALL_LAYERS), "--n-cpu-moe", str(work.n_cpu_moe)]
    return [*flags, *work.more]


class LlamaServer:
    """A llama-server on a free port of loopback; it has loaded its model when the constructor returns.

    Raises EngineError with the end of the server's log when it ends before that, or is not ready in half an hour.
    """

    def __init__(self, work: LlamaServerWork) -> None:
        port = _free_port()
        command = [work.program, "--host", _HOST, "--port", str(port), *llama_server_flags(work)]
        self._process = subprocess.Popen(
            ending_with_parent(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self.client = Client(f"{_HOST}:{port}")
        self._log: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()
        try:
            self._wait()
        except BaseException:
            self.close()
            raise

    def _drain(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            self._log.extend(lines)

    def _wait(self) -> None:
        end = time.monotonic() + _START_SECONDS
        while time.monotonic() < end:
            if self._process.poll() is not None:
                self._reader.join()
                raise EngineError(f"{_PROGRAM} did not start:\n{''.join(self._log.copy())}")
            try:
                self.client.text("GET", "/health")  # 503 while it loads
            except RequestError:
                time.sleep(_POLL_SECONDS)
            else:
                return
        raise EngineError(
            f"{_PROGRAM} has not loaded its model in {_START_SECONDS:.0f} s:\n{''.join(self._log.copy())}"
        )

    def close(self) -> None:
        """End the server and wait for it."""
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()


def _free_port() -> int:
    """A port of loopback that nobody listens on. Older versions do not take port 0, so that it is chosen here."""
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
