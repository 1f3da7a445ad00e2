"""A program in the place of llama-server."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = f"""#!{sys.executable}
import sys
from http.server import ThreadingHTTPServer
sys.path.insert(0, {str(ROOT)!r})
from tests.bench.agents.fake_server import AgentsHandler

class LlamaHandler(AgentsHandler):
    bodies, failing, looks = [], False, 0

    def do_GET(self):
        if self.path != "/health":
            return super().do_GET()
        LlamaHandler.looks += 1  # the model is loaded when it is looked at for the third time
        self.send_response(503 if LlamaHandler.looks < 3 else 200)
        self.end_headers()

words = sys.argv[1:]
open(sys.argv[0] + ".words", "w").write("\\n".join(words))
if "--fail" in words:
    print("error: unable to load model")
    sys.exit(1)
port = int(words[words.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), LlamaHandler).serve_forever()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "llama-server"
    path.write_text(PROGRAM)
    path.chmod(0o755)
    return path
