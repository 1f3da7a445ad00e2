"""`ktransformers serve` in a child process, to be measured from outside."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Sequence

from ktransformers.bench.servers.client import Client
from ktransformers.errors import EngineError
from ktransformers.system.child import ending_with_parent

__all__ = ["ServerProcess"]


class ServerProcess:
    """A server on a free port of loopback; it answers when the constructor returns.

    Raises EngineError with the server's log when it ends before that.
    """

    def __init__(self, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "ktransformers", "serve", "--port", "0", *flags]
        self._process = subprocess.Popen(ending_with_parent(command), stderr=subprocess.PIPE, text=True)
        try:
            self.pid, self.client = self._process.pid, Client(f"127.0.0.1:{self._port()}")
        except BaseException:
            self._process.terminate()
            raise
        self._reader = threading.Thread(target=self._drain, daemon=True)
        self._reader.start()

    def _port(self) -> int:
        assert self._process.stderr is not None
        lines = []
        for line in self._process.stderr:
            lines.append(line)
            found = re.search(r"serving .* on http://127\.0\.0\.1:(\d+)/v1", line)
            if found:
                return int(found[1])
        self._process.wait()
        self._process.stderr.close()
        raise EngineError("the server did not start:\n" + "".join(lines))

    def _drain(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for _ in lines:
                pass

    def metrics(self) -> dict[str, float]:
        """Return the figures of /metrics by name; of those with labels, the last."""
        lines = self.client.text("GET", "/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name.partition("{")[0]: float(value) for name, value in pairs}

    def close(self) -> None:
        """End the server and wait for it."""
        self._process.terminate()
        self._process.wait(60)
        self._reader.join()
