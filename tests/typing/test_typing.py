"""The types that users get: py.typed is there, and mypy --strict agrees with scripts that are right, and only those.

Our own modules count as installed here: what mypy finds in them is not this test's business. Torch and what it brings
are left out, which takes the time of the check from twenty seconds to a few, and hides nothing of the public names.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import ktransformers

HERE = Path(__file__).parent
CONFIG = """
[mypy]
strict = True
[mypy-ktransformers.*]
follow_imports = silent
[mypy-torch.*,transformers.*,tokenizers.*,numpy.*,jinja2.*,gguf.*,safetensors.*,yaml.*,rich.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.mark.slow
def test_a_users_script_passes_mypy_strict(tmp_path: Path) -> None:
    package = Path(ktransformers.__file__).parent
    assert (package / "py.typed").is_file()
    config = tmp_path / "mypy.ini"
    config.write_text(CONFIG)
    scripts = [HERE / "user_script.py", HERE / "wrong_script.py"]
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, *map(str, scripts)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"MYPYPATH": str(package.parent), "PATH": ""},
        check=False,
    )
    found = {(Path(name).name, int(line)) for name, line in re.findall(r"^(.+\.py):(\d+): error", done.stdout, re.M)}
    lines = (HERE / "wrong_script.py").read_text().splitlines()
    wanted = {("wrong_script.py", n) for n, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert found == wanted, done.stdout + done.stderr
