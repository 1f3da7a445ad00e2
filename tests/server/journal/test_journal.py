"""The journal: what is open after a restart, who may have the folder, and what happens when the disk is full."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import stat
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ktransformers.core import (
    Constraint,
    ConstraintKind,
    FinishReason,
    GenerationStats,
    PastToken,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)
from ktransformers.errors import ConfigError
from ktransformers.server.journal import journal as module
from ktransformers.server.journal.file import JournalFile
from ktransformers.server.journal.journal import Journal, state_after
from ktransformers.server.journal.records import (
    Closed,
    GenerationRecord,
    JournalState,
    Kept,
    Noted,
    Opened,
    Record,
    Tokens,
    decoded,
    encoded,
)

MODEL = b"m" * 32


def opened(id: str = "a", body: bytes = b"{}") -> Opened:
    params = SamplingParams(
        seed=(1 << 64) - 1,
        stop=("end",),
        logit_bias={3: 0.5},
        constraint=Constraint(ConstraintKind.REGEX, "a+", (7,)),
    )
    return Opened(
        id=id,
        request_id=f"r-{id}",
        key="",
        path="/v1/chat/completions",
        body=body,
        keep_seconds=60.0,
        created=1,
        deadline=None,
        prompts=((1, 2, 3),),
        generations=(GenerationRecord(0, params, -3, "salt"),),
    )


def token(number: int) -> PastToken:
    return PastToken(0, number, 2, TokenLogprobs(-0.5, ((number, -0.5), (4, -1.25))))


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


@contextmanager
def journal_in(folder: Path, model: bytes = MODEL) -> Iterator[tuple[Journal, list[Kept]]]:
    made = Journal(folder)
    try:
        yield made, made.begin(model)
    finally:
        made.close()


def ids(kept: list[Kept]) -> list[str]:
    return [one.opened.id for one in kept]


def test_the_next_one_knows_what_was_open(tmp_path: Path) -> None:
    async def work() -> None:
        with journal_in(tmp_path / "a" / "b") as (journal, kept):
            assert kept == []
            for id in ("a", "b", "c"):
                journal.opened(opened(id))
            for number in range(5):
                journal.note("a", number, token(number))
                journal.note("b", number, token(number))
            journal.suspended("b", True)
            journal.closed("c")
            assert await journal.written()
        for _ in range(2):  # the second one reads what the first one has made of it
            with journal_in(tmp_path / "a" / "b") as (journal, kept):
                assert ids(kept) == ["a", "b"]
                assert kept[0].opened == opened("a")
                assert [one.tokens for one in kept] == [[token(number) for number in range(5)]] * 2
                assert [one.is_suspended for one in kept] == [False, True]
        for path in (tmp_path / "a" / "b").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "a" / "b").stat().st_mode) == 0o700

    run(work)


def test_nothing_is_written_down_once_it_has_stopped(tmp_path: Path) -> None:
    async def work() -> None:
        with journal_in(tmp_path) as (journal, _):
            journal.opened(opened())
            journal.stop()
            journal.closed("a")
            assert not await journal.written()
        with journal_in(tmp_path) as (_, kept):
            assert ids(kept) == ["a"]

    run(work)


def test_tokens_behind_a_gap_are_not_taken() -> None:
    records: list[Record] = [
        opened(),
        Tokens("a", 0, (token(0),)),
        Tokens("a", 2, (token(2),)),
        Tokens("a", 1, (token(1),)),
    ]
    state = state_after([encoded(record) for record in records])
    assert state.kept["a"].tokens == [token(0), token(1)]
    lost = state_after([encoded(record) for record in (*records[1:], Noted("a", True), Closed("a"))])
    assert (lost.kept, lost.num_bytes) == ({}, 0)


def test_tries_count_until_there_is_a_token() -> None:
    state = JournalState()
    for record in (opened(), Noted("a", False, 1), Noted("a", False, 2)):
        state.apply(record, 1)
    assert state.kept["a"].num_tries == 2
    assert [decoded(encoded(one)) for one in state.kept["a"].records()] == [opened(), Noted("a", False, 2)]
    state.apply(Tokens("a", 0, (token(0),)), 1)
    assert state.kept["a"].num_tries == 0


def test_records_of_another_version_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    state = state_after([encoded(opened()), b"\x93\xa6future\x01\x02", b"\xc1"])
    assert list(state.kept) == ["a"]
    assert "2 records that this version cannot read" in caplog.text


def test_two_servers_cannot_share_a_folder(tmp_path: Path) -> None:
    first = Journal(tmp_path)
    with pytest.raises(ConfigError, match="in use by another server"):
        Journal(tmp_path)
    first.close()
    Journal(tmp_path).close()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is no folder"):
        Journal(tmp_path / "file")
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="damaged"):
        Journal(tmp_path)


def test_another_models_journal_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        with journal_in(tmp_path) as (journal, _):
            journal.opened(opened())
        before = (tmp_path / "journal").read_bytes()
        with journal_in(tmp_path, b"n" * 32) as (_, kept):
            assert kept == []
        (aside,) = tmp_path.glob("journal.*")
        assert aside.read_bytes() == before
        assert "another model" in caplog.text

    run(work)


@pytest.mark.parametrize("what", ["key", "key gone", "pipe", "folder", "link", "owner"])
def test_a_journal_that_is_not_this_servers_is_set_aside(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is thrown away that another key opens, and nothing is waited for."""

    async def write() -> None:
        with journal_in(tmp_path) as (journal, _):
            journal.opened(opened("a"))
            assert await journal.written()

    run(write)
    path, key = tmp_path / "journal", (tmp_path / "key").read_bytes()
    data = path.read_bytes()
    if what == "key":
        (tmp_path / "key").write_bytes(bytes(32))
    elif what == "key gone":
        (tmp_path / "key").unlink()
    elif what == "owner":
        lstat, at = os.fstat, path.stat().st_ino

        def foreign(fd: int) -> os.stat_result:
            found = lstat(fd)
            return os.stat_result([*found[:4], found.st_uid + 1, *found[5:]]) if found.st_ino == at else found

        monkeypatch.setattr(os, "fstat", foreign)
    else:
        path.rename(tmp_path / "elsewhere")
        {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda at: os.symlink("elsewhere", at)}[what](path)

    async def read() -> None:
        with journal_in(tmp_path) as (_, kept):
            assert kept == []

    run(read)
    (aside,) = tmp_path.glob("journal.[0-9]*")
    assert "is not used: " in caplog.text
    assert aside.name in caplog.text
    if what in ("key", "key gone", "owner"):
        monkeypatch.undo()
        (tmp_path / "key").write_bytes(key)  # who finds the key again has all of it
        aside.rename(path)

        async def again() -> None:
            with journal_in(tmp_path) as (_, kept):
                assert ids(kept) == ["a"]

        run(again)
    else:
        assert (tmp_path / "elsewhere").read_bytes() == data


@pytest.mark.parametrize("mode", [0o777, 0o750, 0o705, 0o701])
def test_a_folder_that_others_can_enter_is_refused(mode: int, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match=r"--state_dir .*state can be entered by others: .*chmod 700 it"):
        Journal(folder)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("what", ["0666", "0640", "pipe", "folder", "link", "short"])
def test_a_key_that_others_may_know_is_refused(what: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    Journal(tmp_path).close()
    if what in ("pipe", "folder", "link"):
        path.rename(tmp_path / "elsewhere")
        {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda at: os.symlink("elsewhere", at)}[what](path)
    elif what == "short":
        path.write_bytes(b"x")
    else:
        path.chmod(int(what, 8))
    with pytest.raises(ConfigError, match=r"key (cannot be used: .*600|is damaged)"):
        Journal(tmp_path)
    if what == "0666":
        path.chmod(0o600)
        Journal(tmp_path).close()


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text("")])
def test_what_is_no_folder_is_refused(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "state")
    with pytest.raises(ConfigError, match=r"--state_dir .* is no folder"):
        Journal(tmp_path / "state")


def test_a_torn_end_is_cut_off_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        with journal_in(tmp_path) as (journal, _):
            journal.opened(opened())
            await journal.written()
            journal.note("a", 0, token(0))
        os.truncate(tmp_path / "journal", (tmp_path / "journal").stat().st_size - 3)
        with journal_in(tmp_path) as (_, kept):
            assert ids(kept) == ["a"]
            assert kept[0].tokens == []
        assert "not finished: cut off" in caplog.text

    run(work)


def test_ended_requests_are_compacted_away(tmp_path: Path) -> None:
    async def work() -> None:
        with journal_in(tmp_path) as (journal, _):
            journal.opened(opened("kept"))
            for number in range(40):
                journal.opened(opened(str(number), os.urandom(100_000)))
                journal.closed(str(number))
                journal.note("kept", number, token(number))
                await journal.written()
            assert (tmp_path / "journal").stat().st_size < 1_300_000
        with journal_in(tmp_path) as (_, kept):
            assert ids(kept) == ["kept"]
            assert kept[0].tokens == [token(number) for number in range(40)]
        assert (tmp_path / "journal").stat().st_size < 10_000

    run(work)


def test_a_full_disk_ends_the_journal_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def work() -> None:
        with journal_in(tmp_path) as (journal, _):
            monkeypatch.setattr(JournalFile, "append", full)
            journal.opened(opened())
            assert await journal.written()  # whoever waits goes on
            journal.note("a", 0, token(0))
            assert await journal.written()

    run(work)
    (line,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert "No space left" in line.getMessage()


def test_nobody_hears_of_a_token_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, append = threading.Event(), JournalFile.append

    def slow(self: JournalFile, payloads: list[bytes]) -> None:
        gate.wait()
        append(self, payloads)

    async def work() -> None:
        with journal_in(tmp_path) as (journal, _):
            monkeypatch.setattr(JournalFile, "append", slow)
            journal.opened(opened())
            waiting = asyncio.create_task(journal.written())
            for _ in range(100):
                await asyncio.sleep(0)
            assert not waiting.done()
            gate.set()
            assert await waiting

    run(work)


@pytest.mark.parametrize(
    ("stop", "reason", "wanted"),
    [
        (None, None, None),
        (2, FinishReason.STOP, FinishReason.STOP),
        ("end", FinishReason.STOP, FinishReason.LENGTH),
        (None, FinishReason.LENGTH, FinishReason.LENGTH),
    ],
)
def test_a_past_token_is_what_its_event_was_made_of(
    stop: int | str | None, reason: FinishReason | None, wanted: FinishReason | None
) -> None:
    stats = GenerationStats(prompt_len=4, cached_len=3)
    past = PastToken.of(1, TokenEvent(9, "text", stats, finish_reason=reason, stop=stop))
    assert past == PastToken(1, 9, 3, reason=wanted)
    assert PastToken.of(0, TokenEvent(None, "", stats, finish_reason=FinishReason.ABORT)) is None


def test_tokens_that_come_together_are_one_record() -> None:
    records: list[Record] = [
        opened(),
        Tokens("a", 3, (token(3),)),
        Tokens("a", 4, (token(4),)),
        Tokens("b", 0, (token(0),)),
    ]
    records += [Closed("b"), Tokens("a", 5, (token(5),))]
    assert module._joined(records) == [
        opened(),
        Tokens("a", 3, (token(3), token(4))),
        *records[3:],
    ]
