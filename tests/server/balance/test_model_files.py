"""Files of weights that change while they are served: what ends the service, and what is only a touch."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from ktransformers.errors import EngineError, WeightError
from ktransformers.server.backend.interfaces.balance_serve import BalanceServeInterface
from ktransformers.server.balance.model_files import ModelFiles
from ktransformers.server.balance.supervisor import FILE_CHECK_SECONDS
from ktransformers.weights.digests import files as digests
from ktransformers.weights.digests import states
from tests.server.balance.test_restarts import LONG, killed
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.balance_backend import backend, check, collect, request, run, until
from tests.support.servers.balance_fakes import ManualClock


@asynccontextmanager
async def on_a_copy(tmp_path: Path, clock: ManualClock):  # type: ignore[no-untyped-def]
    model = tmp_path / DEMO_GGUF.name
    shutil.copy(DEMO_GGUF, model)
    async with backend("load_slow", clock=clock, model=model) as made:
        yield made, model


def is_read(made: BalanceServeInterface) -> bool:
    """Whether all of the files' bytes are known."""
    return all(known.digest is not None for known in made.supervisor._files._known.values())


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


def test_a_file_that_is_cut_short_ends_the_service(tmp_path: Path) -> None:
    async def work() -> None:
        clock = ManualClock()
        async with on_a_copy(tmp_path, clock) as (made, model):
            stream = asyncio.create_task(collect(made, request(1, params={"max_tokens": 2000, "ignore_eos": True})))
            await until(lambda: made.stats().engine.num_steps > 3 and FILE_CHECK_SECONDS in clock.sleeping)
            clock.wake(FILE_CHECK_SECONDS)
            await until(lambda: FILE_CHECK_SECONDS in clock.sleeping)
            assert not made.supervisor.failed.done()
            truncate(model)
            clock.wake(FILE_CHECK_SECONDS)
            with pytest.raises(EngineError, match=r"was cut from \d+ to \d+ bytes while it was served"):
                await stream
            assert isinstance(await made.lost(), WeightError)

    run(work)


@pytest.mark.parametrize("is_same", [False, True])
def test_no_engine_is_started_on_other_bytes(is_same: bool, tmp_path: Path) -> None:
    """Whatever the inode is: a copy that was renamed into place goes on being served."""

    async def work() -> None:
        clock = ManualClock()
        async with on_a_copy(tmp_path, clock) as (made, model):
            other = Path(shutil.copy(model, tmp_path / "other"))
            if not is_same:
                overwrite(other, -5000, b"?")
            await until(lambda: is_read(made) and FILE_CHECK_SECONDS in clock.sleeping)
            other.replace(model)
            clock.wake(FILE_CHECK_SECONDS)  # the file that is mapped is as it was
            await until(lambda: FILE_CHECK_SECONDS in clock.sleeping)
            assert not made.supervisor.failed.done()
            stream = await killed(made, 1)
            if is_same:
                check(await stream, request(1, params=LONG))
                assert not made.supervisor.failed.done()
                return
            with pytest.raises(EngineError, match="was written to or replaced"):
                await stream
            assert isinstance(await made.lost(), WeightError)

    run(work)


@pytest.fixture
def digest_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests of files are kept for one test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ktransformers" / "weights"


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(data)


def write_and_put_times_back(path: Path, at: int) -> None:
    before = path.stat()
    overwrite(path, at, b"?")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by(path: Path, data: bytes) -> None:
    other = path.with_name("other")
    other.write_bytes(data)
    other.replace(path)


DATA = bytes(range(256)) * 64
SEEN: dict[str, tuple[Callable[[Path], object], bool, bool]] = {  # a change; whether a map shows it, whether the next
    "nothing": (lambda file: None, False, False),
    "cut": (lambda file: os.truncate(file, 4), True, True),
    "longer": (lambda file: overwrite(file, len(DATA), b"?"), True, True),
    "rewritten": (lambda file: file.write_bytes(DATA[::-1]), True, True),
    "one byte, times as before": (lambda file: write_and_put_times_back(file, 9000), True, True),
    "the last byte": (lambda file: write_and_put_times_back(file, len(DATA) - 1), True, True),
    "rewritten with the same": (lambda file: file.write_bytes(DATA), False, False),
    "gone": (lambda file: file.unlink(), False, True),  # the map lives on
    "replaced": (lambda file: replace_by(file, DATA[::-1]), False, True),
    "replaced by the same": (lambda file: replace_by(file, DATA), False, False),
    "touched": (lambda file: os.utime(file, (1, 1)), False, False),
    "other rights": (lambda file: file.chmod(0o400), False, False),
    "another name": (lambda file: file.with_name("more").hardlink_to(file), False, False),
}


@pytest.mark.parametrize("change", SEEN)
def test_what_is_seen_of_files(change: str, tmp_path: Path, digest_cache: Path) -> None:
    make, *expected = SEEN[change]
    file = tmp_path / "weights"
    file.write_bytes(DATA)
    files = ModelFiles([file])
    files.read()
    assert (files.written_to(), files.changed()) == (None, None)
    make(file)
    for _ in range(2):
        assert [files.written_to() is not None, files.changed() is not None] == expected


def test_a_file_that_took_the_place_of_another_is_watched(tmp_path: Path, digest_cache: Path) -> None:
    """Once an engine may have opened it."""
    file = tmp_path / "weights"
    file.write_bytes(DATA)
    files = ModelFiles([file])
    files.read()
    replace_by(file, DATA)
    assert files.changed() is None
    write_and_put_times_back(file, 7)
    assert "was written to or replaced" in str(files.written_to())


def test_looks_read_nothing_of_files_that_nobody_touched(
    tmp_path: Path, digest_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ktransformers.server")
    monkeypatch.setattr(states, "_SETTLED_NS", -(1 << 62))  # files are taken for old ones
    file, reads, chunk = tmp_path / "weights", [], digests._chunk
    file.write_bytes(DATA)
    monkeypatch.setattr(digests, "_chunk", lambda state, at: reads.append(state) or chunk(state, at))
    files = ModelFiles([file])
    files.read()
    ModelFiles([file]).read()  # by the record
    assert len(reads) == len(list(digest_cache.iterdir())) == 1
    for seconds, count in ((1, 2), (2, 3), (2, 4)):
        os.utime(file, (seconds, seconds))
        for _ in range(3):
            assert (files.written_to(), files.changed()) == (None, None)
        assert len(reads) == caplog.text.count("has another time and the same bytes") + 1 == count


def test_what_changes_before_it_was_read_is_not_known(tmp_path: Path, digest_cache: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(DATA)
    files = ModelFiles([file])
    os.utime(file, (1, 1))
    for _ in range(2):
        assert "or touched before its bytes were read" in str(files.written_to())
        files.read()
    files.close()
    assert (files.written_to(), files.changed()) == (None, None)


def test_files_are_not_read_to_their_end_for_a_service_that_ends(
    tmp_path: Path, digest_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reads, chunk = tmp_path / "weights", [], digests._chunk
    file.write_bytes(DATA)
    files = ModelFiles([file])

    def read(state: states.FileState, at: int) -> bytes:
        reads.append(at)
        files.close()
        return chunk(state, at)

    monkeypatch.setattr(digests, "CHUNK_BYTES", 1024)
    monkeypatch.setattr(digests, "_chunk", read)
    files.read()
    assert reads == [0]


def test_a_touch_does_not_end_the_service(tmp_path: Path) -> None:
    async def work() -> None:
        clock = ManualClock()
        async with on_a_copy(tmp_path, clock) as (made, model):
            await until(lambda: is_read(made) and FILE_CHECK_SECONDS in clock.sleeping)
            os.utime(model, (1, 1))
            clock.wake(FILE_CHECK_SECONDS)
            await until(lambda: FILE_CHECK_SECONDS in clock.sleeping)
            check(await (await killed(made, 1)), request(1, params=LONG))  # on an engine that loads the file again
            assert not made.supervisor.failed.done()

    run(work)
