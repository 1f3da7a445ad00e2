"""What child processes do first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.system.child import import_aside

SEEN = """
import os, threading
of_thread = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are those of processes elsewhere")
def test_imports_aside_have_the_lowest_priority_and_their_process_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    code = (
        "import os; from ktransformers.system.child import import_aside; import_aside('seen'); import seen; "
        "print(seen.of_thread, os.getpriority(os.PRIO_PROCESS, 0))"
    )
    environment = {"PYTHONPATH": ":".join((str(tmp_path), *sys.path))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["19", str(os.getpriority(os.PRIO_PROCESS, 0))]


def test_what_an_import_aside_raises_is_raised() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_aside("no_such_module")
