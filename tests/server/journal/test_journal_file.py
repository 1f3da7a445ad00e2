"""Journal files: whatever is cut off, flipped or swapped, what is read is a subset of what was written, in order."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ktransformers.server.journal.file import JournalFile, WrongJournalError, contents_of

KEY, MODEL = bytes(range(32)), b"m" * 32
HEAD = 68  # bytes in front of the first record


def file_with(folder: Path, payloads: list[bytes]) -> bytes:
    made = JournalFile(folder / "journal", KEY, MODEL)
    made.append(payloads[:1])
    made.append(payloads[1:])
    made.install()
    made.sync()
    made.close()
    data = (folder / "journal").read_bytes()
    assert len(data) == made.num_bytes
    return data


def is_subset(some: tuple[bytes, ...], payloads: list[bytes]) -> bool:
    rest = iter(payloads)
    return all(one in rest for one in some)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[bytes]]:
    payloads = [bytes([n]) * (7 * n) + b"\xf5KTJ" for n in range(12)]  # with what looks like a mark
    return file_with(tmp_path_factory.mktemp("journal"), payloads), payloads


def test_a_whole_file_has_everything_and_is_private(tmp_path: Path) -> None:
    payloads = [b"", b"secret text", b"x" * 100_000]
    data = file_with(tmp_path, payloads)
    contents = contents_of(data, KEY, MODEL)
    assert (contents.payloads, contents.num_damaged, contents.torn) == (tuple(payloads), 0, 0)
    assert b"secret" not in data
    assert stat.S_IMODE((tmp_path / "journal").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]


def test_every_prefix_has_its_whole_records(written: tuple[bytes, list[bytes]]) -> None:
    data, payloads = written
    before = 0
    for end in range(len(data)):
        contents = contents_of(data[:end], KEY, MODEL)
        assert contents.payloads == tuple(payloads[: len(contents.payloads)])
        assert contents.num_damaged == 0
        assert before <= len(contents.payloads) <= before + 1
        before = len(contents.payloads)
    assert before == len(payloads) - 1


def test_a_flipped_bit_costs_one_record(written: tuple[bytes, list[bytes]]) -> None:
    data, payloads = written
    for at in range(HEAD, len(data), 3):
        flipped = bytearray(data)
        flipped[at] ^= 1 << at % 8
        contents = contents_of(bytes(flipped), KEY, MODEL)
        assert is_subset(contents.payloads, payloads)
        assert len(contents.payloads) == len(payloads) - 1
        assert bool(contents.num_damaged) != bool(contents.torn)


def test_another_file_is_not_read(written: tuple[bytes, list[bytes]]) -> None:
    data, _ = written
    with pytest.raises(WrongJournalError, match="another model"):
        contents_of(data, KEY, b"n" * 32)
    with pytest.raises(WrongJournalError, match="version"):
        contents_of(b"{}" * 100, KEY, MODEL)
    for at in range(16, HEAD):
        flipped = bytearray(data)
        flipped[at] ^= 16
        with pytest.raises(WrongJournalError, match="first bytes"):
            contents_of(bytes(flipped), KEY, MODEL)
    with pytest.raises(WrongJournalError, match="sealed with another key"):
        contents_of(data, bytes(32), MODEL)


@pytest.mark.parametrize("payloads", [[b"one"], [b"", b"x" * 5000], [b"\xf5KTJ" * 9] * 4])
def test_what_nobody_can_open_is_no_end_that_was_not_finished(payloads: list[bytes], tmp_path: Path) -> None:
    data = file_with(tmp_path, payloads)
    for end in range(HEAD + 1, len(data)):
        try:
            assert contents_of(data[:end], bytes(32), MODEL).payloads == ()  # not one record is whole
        except WrongJournalError:
            assert end >= HEAD + 20 + len(payloads[0]) + 16


@given(st.data())
def test_any_damage_gives_a_subset(written: tuple[bytes, list[bytes]], data: st.DataObject) -> None:
    """Stretches that are lost, doubled, moved or overwritten."""
    whole, payloads = written
    begin = data.draw(st.integers(HEAD, len(whole)))
    end = data.draw(st.integers(begin, len(whole)))
    to = data.draw(st.integers(HEAD, len(whole)))
    piece = data.draw(st.sampled_from((b"", whole[begin:end], bytes(end - begin))))
    damaged = whole[:to] + piece + whole[data.draw(st.sampled_from((to, end, begin))) :]
    try:
        found = contents_of(damaged, KEY, MODEL).payloads
    except WrongJournalError:
        found = ()  # set aside as a whole: there are records, and none of them opens
    assert is_subset(found, payloads)
