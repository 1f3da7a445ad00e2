"""Child processes of a group: how they begin, how their ends are noticed, and that none is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ktransformers.errors import EngineError
from ktransformers.system import process_group
from ktransformers.system.child import PARENTS_SIGNALS
from ktransformers.system.process_group import ChildProcess, ProcessGroup, Program

ROOT = str(Path(__file__).resolve().parents[2])
ECHO = "import os\nwhile data := os.read(0, 100): os.write(1, data)"
ENDLESS = "import signal\nprint('up', flush=True)\nwhile True: signal.pause()"
STUBBORN = "import signal\nsignal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n"
STUBBORN += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + ENDLESS
POLITE = "import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
POLITE += "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})\n" + ENDLESS


def script(code: str, **options: Any) -> Program:
    return Program("a child", [sys.executable, "-c", code], **{"stdout": subprocess.PIPE, **options})


def wait_until_up(child: ChildProcess) -> None:
    assert child.stdout.readline() == b"up\n"


def wait_until_gone(pid: int) -> None:
    """Also of a process that is nobody's child here."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([fd], [], [], 60)[0]
    finally:
        os.close(fd)


def open_files() -> set[str]:
    """What descriptors of this process refer to. That of the listing itself is gone when it is asked."""
    targets = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            targets.add(os.readlink(f"/proc/self/fd/{fd}"))
    return targets


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    made = ProcessGroup()
    yield made
    made.close()


def test_a_process_gets_what_it_is_sent_and_its_environment(group: ProcessGroup) -> None:
    code = "import os, sys; sys.stdout.write(os.environ['WHERE'] + str(len(sys.stdin.buffer.read(1 << 20))))"
    child = group.start(script(code, environment={**os.environ, "WHERE": "here "}))
    child.send(bytes(1 << 20))  # more than a pipe holds
    assert child.stdout.read() == b"here 1048576"
    assert (child.wait(60), child.returncode, child.poll()) == (0, 0, 0)
    assert group.processes == []
    with pytest.raises(BrokenPipeError):
        child.send(b"more")


def test_a_descriptor_can_be_its_standard_input_and_output(group: ProcessGroup) -> None:
    reader, writer = os.pipe()
    child = group.start(script("print('hello')", stdin=None, stdout=writer))
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"hello\n"
    assert child.wait(60) == 0


def test_a_process_that_is_killed_is_noticed_and_leaves_no_zombie(group: ProcessGroup) -> None:
    child, codes, has_ended = group.start(script(ENDLESS)), [], threading.Event()

    def ended(code: int) -> None:
        codes.append(code)
        has_ended.set()

    child.on_end(ended)
    wait_until_up(child)
    assert child.returncode is None
    assert group.processes == [child]
    os.kill(child.pid, signal.SIGKILL)
    assert has_ended.wait(60)
    assert (codes, child.returncode, group.processes) == ([-9], -9, [])
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)  # a zombie would take the signal
    child.on_end(codes.append)
    assert codes == [-9, -9]
    child.kill()  # to nobody


def test_a_process_that_cannot_start(group: ProcessGroup) -> None:
    missing = Program("the engine process", ["/nowhere/python"], keeps_words=True)
    with pytest.raises(EngineError, match=r"^the engine process cannot be started: No such file or directory$"):
        group.start(missing)
    with pytest.raises(EngineError, match="null byte"):
        group.start(Program("the engine process", ["a\0b"]))
    assert group.processes == []
    group.close()


def test_a_system_without_threads_is_said(group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        with pytest.raises(EngineError, match="a child cannot be started: can't start new thread"):
            group.start(script(ENDLESS))
    assert group.processes == []


def test_last_words_are_kept_where_that_is_wished(group: ProcessGroup) -> None:
    child = group.start(script("import sys; sys.exit('a' * 9000 + ' no memory')", keeps_words=True))
    assert child.wait(60) == 1
    assert child.last_words.endswith("a no memory")
    assert len(child.last_words) < 4096
    assert group.start(script("")).last_words == ""


def test_a_process_lives_on_when_the_thread_that_asked_for_it_ends(group: ProcessGroup) -> None:
    """The system kills a child that follows its parent with the parent's thread."""
    code = f"import sys; sys.path.insert(0, {ROOT!r})\n"
    code += "from ktransformers.system.child import follow_parent\nfollow_parent()\nprint('up', flush=True)\n" + ECHO
    started: list[ChildProcess] = []

    def start() -> None:
        started.append(group.start(script(code)))
        wait_until_up(started[0])  # it follows from now on

    thread = threading.Thread(target=start)
    thread.start()
    thread_id = thread.native_id
    thread.join()
    while Path(f"/proc/self/task/{thread_id}").exists():  # the system's thread ends a little later than Python's
        os.sched_yield()
    (child,) = started
    child.send(b"hello")
    assert child.stdout.read(5) == b"hello"


PARENT = f"""
import sys; sys.path.insert(0, {ROOT!r})
from ktransformers.system.process_group import ProcessGroup, Program
code = "import sys; sys.path.insert(0, {ROOT!r}); from ktransformers.system.child import follow_parent; "
code += "follow_parent(); print('up', flush=True)\\nwhile True: sys.stdin.read() and None"
group = ProcessGroup()
children = [group.start(Program("a child", [sys.executable, "-c", code], stdin=None, stdout=-1)) for _ in range(2)]
assert all(child.stdout.readline() == b"up\\n" for child in children)
print(*(child.pid for child in children), flush=True)
children[0].wait()
"""


def test_children_end_with_a_parent_that_is_killed() -> None:
    """Though they read nothing that would end: the pipe to them is not theirs alone."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=-1, stdout=-1) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        parent.kill()
        parent.wait()
        for pid in pids:
            wait_until_gone(pid)


@pytest.mark.parametrize(
    ("code", "grace", "ends_with", "is_warned"),
    [
        (ENDLESS, 0.0, -9, False),
        (POLITE, 60.0, 7, False),
        ("print('up', flush=True)\n" + ECHO, 60.0, 0, False),  # at the end of its input; SIGTERM is blocked
        (STUBBORN, 0.05, -9, True),
    ],
)
def test_how_a_process_is_stopped(
    code: str, grace: float, ends_with: int, is_warned: bool, group: ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    child = group.start(script(code))
    wait_until_up(child)
    group.stop(child, grace)
    assert child.returncode == ends_with
    assert child.stdout.read() == b""
    assert caplog.messages == ["a child does not end within 0.05 s: it is killed"] * is_warned
    group.stop(child, grace)  # twice is no harm


def test_one_that_reads_nothing_can_be_stopped_while_it_is_sent_more(group: ProcessGroup) -> None:
    child = group.start(script(ENDLESS))
    wait_until_up(child)
    errors: list[BaseException] = []

    def send() -> None:
        try:
            child.send(bytes(1 << 24))
        except BrokenPipeError as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    group.stop(child, 0.01)
    thread.join(60)
    assert len(errors) == 1


def test_all_end_the_last_one_first_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    files, threads = open_files(), set(threading.enumerate())
    killed: list[ChildProcess] = []
    kill = ChildProcess.kill
    monkeypatch.setattr(ChildProcess, "kill", lambda self: (killed.append(self), kill(self)))
    group = ProcessGroup()
    folder = group.folder.path
    assert group.folder.path == folder
    children = [group.start(script(ENDLESS)) for _ in range(3)]
    (folder / "socket").touch()
    group.close()
    assert killed == children[::-1]
    assert [child.returncode for child in children] == [-9, -9, -9]
    assert not folder.exists()
    for child in children:
        child._thread.join(60)
    assert open_files() <= files  # those of earlier tests may end meanwhile
    assert set(threading.enumerate()) <= threads
    group.close()
    with pytest.raises(EngineError, match="a child is not started: what it belongs to ends"):
        group.start(script(ENDLESS))


def test_stopping_while_a_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not there yet when all are killed, and is killed as soon as it is."""
    is_starting, may_start = threading.Event(), threading.Event()

    class Slow(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **kwargs: Any):
            is_starting.set()
            assert may_start.wait(60)
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(process_group.subprocess, "Popen", Slow)
    group, started = ProcessGroup(), []
    starting = threading.Thread(target=lambda: started.append(group.start(script(ENDLESS))))
    starting.start()
    assert is_starting.wait(60)
    (child,) = group.processes
    closing = threading.Thread(target=group.close)
    closing.start()
    while not child._is_doomed:
        os.sched_yield()
    may_start.set()
    for thread in (starting, closing):
        thread.join(60)
        assert not thread.is_alive()
    assert started == [child]
    assert child.returncode == -9


def test_signals_of_a_shutdown_are_left_to_the_parent_from_the_first_moment_on(group: ProcessGroup) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    code = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))"
    child = group.start(script(code))
    assert {signal.Signals(int(number)) for number in child.stdout.read().split()} >= set(PARENTS_SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


def test_event_loops_wait_for_ends_and_may_cease_to(group: ProcessGroup) -> None:
    async def work() -> None:
        child, other = group.start(script(ENDLESS)), group.start(script(ENDLESS))
        waiting = asyncio.create_task(child.ended())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert waiting.cancelled()
        both = asyncio.gather(child.ended(), child.ended())
        await group.stop_async(child)
        assert await both == [-9, -9]
        assert other.returncode is None
        await group.close_async()
        assert await other.ended() == -9

    asyncio.run(work())


FORKED = f"""
import os, sys; sys.path.insert(0, {ROOT!r})
from ktransformers.system.process_group import ProcessGroup, Program
group = ProcessGroup()
folder = group.folder.path
child = group.start(Program("a child", [sys.executable, "-c", {ECHO!r}], stdout=-1))
pid = os.fork()
if pid == 0:
    child.kill()
    group.stop(child)
    group.close()
    os._exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
child.send(b"alive")
print(child.stdout.read(5).decode(), folder.exists())
group.close()
print(child.returncode)
"""


def test_a_forked_copy_of_the_parent_has_no_part_in_its_children() -> None:
    done = subprocess.run([sys.executable, "-c", FORKED], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["5", "alive True", "-9", ""]
