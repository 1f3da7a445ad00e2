"""What child processes do first."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.errors import CapacityError, EngineError, KTransformersError, LoadFailedError
from ktransformers.system.child import import_aside, reported_error

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


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are those of processes elsewhere")
def test_work_aside_is_never_above_its_process() -> None:
    code = (
        "import os, threading; from ktransformers.system.child import run_aside; "
        "seen = lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()); "
        "print(run_aside(seen, 19), os.nice(19), run_aside(seen, 10))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["19", "19", "19"]


def test_what_an_import_aside_raises_is_raised() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        import_aside("no_such_module")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("CapacityError", CapacityError),
        ("ValueError", EngineError),
        ("reason_of", EngineError),
        (LoadFailedError.__name__, EngineError),  # takes more than a message
    ],
)
def test_errors_of_another_process_have_their_class_where_there_is_one(
    name: str, kind: type[KTransformersError]
) -> None:
    error = reported_error(name, "it does not fit")
    assert (type(error), str(error)) == (kind, "it does not fit")


WATCHING = """
import os, sys, time
from ktransformers.system.child import end_with_pipe
end_with_pipe(sys.stdin.buffer, int(sys.argv[1]))
print("up", flush=True)
os.read(os.pipe()[0], 1)
"""


@pytest.mark.parametrize("is_parent", [True, False])
def test_a_process_ends_with_its_pipe_or_where_its_parent_is_gone_already(is_parent: bool) -> None:
    command = [sys.executable, "-c", WATCHING, str(os.getpid() if is_parent else 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        if is_parent:
            child.stdin.write(b"not yet")
            child.stdin.flush()
        assert child.stdout.readline() == (b"up\n" if is_parent else b"")
        child.stdin.close()
        assert child.wait(60) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_a_program_ends_with_a_parent_that_is_killed() -> None:
    code = (
        "import subprocess, sys; from ktransformers.system.child import ending_with_parent\n"
        "made = subprocess.Popen(ending_with_parent(['sleep', '600'])); print(made.pid, flush=True); sys.stdin.read()"
    )
    pipes: dict[str, int] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as parent:  # type: ignore[call-overload]
        watched = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    try:
        assert select.select([watched], [], [], 60)[0]
    finally:
        os.close(watched)
