"""Pictures through the child process: files of the store, deaths, limits."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

from ktransformers.errors import ConfigError
from ktransformers.media import reader as reader_module
from ktransformers.media.decoding import decode
from ktransformers.media.picture import ReadPicture, media_items, with_media_ids
from ktransformers.media.processing import Processor, bound_squares
from ktransformers.media.reader import ChildReader, key_of
from ktransformers.media.store import PictureStore
from tests.support.pictures.folders import FAMILIES, write_folder


def png(width: int, height: int) -> bytes:
    data = io.BytesIO()
    Image.linear_gradient("L").convert("RGB").resize((width, height)).save(data, "PNG")
    return data.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", FAMILIES["qwen3_vl"])


@pytest.fixture(scope="module")
def reader(folder: Path) -> Iterator[ChildReader]:
    made = ChildReader(folder, PictureStore())
    yield made
    made.close()


def test_its_file_has_what_the_processor_gives(folder: Path, reader: ChildReader) -> None:
    data = png(100, 60)
    picture = reader.read(data)
    assert (picture.width, picture.height) == (100, 60)
    path = reader.store.path(picture.digest)
    assert path.stat().st_mode & 0o777 == 0o600
    wanted = Processor(folder, lambda note: None).process(decode(data, lambda note: None), "auto")
    found = load_file(path)
    assert found.keys() == wanted.tensors.keys() == {"pixel_values", "image_grid_thw"}
    assert all((found[name] == wanted.tensors[name]).all() for name in found)
    assert (picture.digest, picture.text) == (wanted.digest, wanted.text)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"kind": "image"}
    grid = found["image_grid_thw"][0].tolist()
    assert picture.num_positions == grid[0] * grid[1] * grid[2] // 4


def test_a_picture_is_decoded_once(reader: ChildReader, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = reader.read(png(70, 70))
    with monkeypatch.context() as patched:
        patched.setattr(reader.child, "ask", None)
        assert reader.read(png(70, 70)) == picture
    reader.store._nbytes.pop(picture.digest)  # as if it had gone for others
    assert reader.read(png(70, 70)) == picture


def test_those_that_were_asked_for_last_are_known(reader: ChildReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_MOST_KNOWN", 2)
    one, other, third = (png(side, side) for side in (71, 72, 73))
    for data in (one, other, one, third):
        reader.read(data)
    assert [reader.known(key_of(data)) is not None for data in (one, other, third)] == [True, False, True]
    assert reader.known(key_of(one), "low") is None


def test_a_picture_waits_for_the_process_that_starts_ahead(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = ChildReader(folder, PictureStore())
    reader.start_ahead()
    assert reader.read(png(40, 40)).width == 40
    assert reader._starting is not None
    reader._starting.join()
    process = reader.child.process
    assert reader.read(png(50, 50)).width == 50
    assert reader.child.process is process
    reader.close()
    assert not caplog.records


def test_a_process_that_dies_while_it_starts_is_started_by_the_first_picture(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ChildReader(folder, PictureStore())
    command, reader.child._command = reader.child._command, [sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"]
    reader.start_ahead()
    assert reader._starting is not None
    reader._starting.join()
    assert "pictures cannot be read so far: the process that reads pictures does not start: signal 9" in caplog.text
    reader.child._command = command
    assert reader.read(png(40, 40)).width == 40
    reader.close()


def test_closing_does_not_wait_for_a_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    reader = ChildReader(folder, PictureStore())
    reader.child._command = [sys.executable, "-c", "import sys; sys.stdin.read()"]  # never answers
    reader.start_ahead()
    reader.close()
    assert reader.child.process is None
    assert not caplog.records
    assert not reader.store.folder.exists()


def test_detail(reader: ChildReader) -> None:
    counts = [reader.read(png(2000, 2000), detail).num_positions for detail in (None, "auto", "high", "low")]
    assert counts[0] == counts[1] == counts[2] == 64
    assert counts[3] == 64  # what the folder allows is less than 512 x 512
    with pytest.raises(ConfigError, match="detail 'much' is not one of auto, low, high"):
        reader.read(png(8, 8), "much")


def test_low_detail_is_fewer_positions(tmp_path: Path) -> None:
    family = FAMILIES["internvl"]
    processor = Processor(write_folder(tmp_path, "internvl", family), lambda note: None)
    image = Image.new("RGB", (300, 100))
    counts = {detail: processor.process(image, detail).num_positions for detail in ("auto", "low", "high")}
    assert counts["low"] == 4 < counts["auto"] == counts["high"]


class TypedTokens:
    """A processor that counts 5, 6 and 7 to a picture, as Molmo 2's does what stands around its patches."""

    return_mm_token_type_ids = True

    def create_mm_token_type_ids(self, ids: list[list[int]]) -> list[list[int]]:
        return [[int(5 <= one <= 7) for one in line] for line in ids]


@pytest.mark.parametrize(
    ("ids", "margins"),
    [
        ([5, 6, 6, 7, 5, 6, 7, 7], (1, 2)),
        ([1, 7, 6, 2, 7], (1, 0)),
        ([1, 5, 2, 6, 6, 3], (0, 0)),
    ],
)
def test_tokens_around_positions_are_of_the_picture(ids: list[int], margins: tuple[int, int]) -> None:
    made = Processor.__new__(Processor)
    made._processor, made.position_token_ids = TypedTokens(), frozenset({6})
    assert made._margins(ids) == margins
    count = ids.count(6)
    picture = ReadPicture(bytes(32), "", count, 1, 1, *margins)
    prompt = with_media_ids([9, *ids, 9], [picture], frozenset({6}))
    (item,) = media_items(prompt, [picture])
    first, last = ids.index(6), len(ids) - 1 - ids[::-1].index(6)
    assert (item.start, item.end) == (1 + first - margins[0], 2 + last + margins[1])


def kill_at(reader: ChildReader) -> subprocess.Popen[bytes]:
    """End the process that runs. Returns it."""
    reader.child.start()
    process = reader.child.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    return process


def test_a_kill_between_two_requests_ends_none(reader: ChildReader) -> None:
    process = kill_at(reader)
    assert reader.read(png(11, 11)).width == 11
    assert reader.child.process is not process


def test_a_kill_ends_one_request(reader: ChildReader, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(subprocess.Popen, "poll", lambda process: None)  # it dies of the question
        process = kill_at(reader)
        with pytest.raises(ConfigError, match=r"the process that reads it ended \(signal 9\)"):
            reader.read(png(13, 13))
    assert reader.read(png(13, 13)).width == 13
    assert reader.child.process is not process


def test_one_that_takes_too_long_is_given_up(reader: ChildReader, monkeypatch: pytest.MonkeyPatch) -> None:
    reader.read(png(10, 10))
    process = reader.child.process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(reader_module, "_SECONDS", 0.2)
    with pytest.raises(ConfigError, match="it took more than 0 s; make it smaller"):
        reader.read(os.urandom(1 << 20))  # more than a pipe holds
    monkeypatch.undo()
    assert reader.read(png(12, 12)).width == 12


def test_what_the_processor_refuses(reader: ChildReader) -> None:
    with pytest.raises(ConfigError, match="refuses the picture of 1 x 1000 pixels: absolute aspect ratio"):
        reader.read(png(1, 1000))
    with pytest.raises(ConfigError, match=r"the picture is 1 x 100000; at most"):
        reader.read(png(1, 100_000))
    with pytest.raises(ConfigError, match="has 67108865 bytes; at most 67108864"):
        reader.read(bytes((64 << 20) + 1))


def test_what_the_processor_has_no_memory_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pad(*args: object, **kwargs: object) -> None:
        raise MemoryError("Unable to allocate 3.00 GiB")

    processor = Processor(folder, lambda note: None)
    monkeypatch.setattr(processor, "_processor", pad)
    with pytest.raises(ConfigError, match="picture of 1 x 9 pixels: it takes too much memory; make it smaller"):
        processor.process(Image.new("RGB", (1, 9)), "auto")


def test_no_square_is_made_of_a_long_and_narrow_picture() -> None:
    plain, bounded = (LlavaImageProcessorPil(do_pad=True, size={"shortest_edge": 8}) for _ in range(2))
    bound_squares(bounded)
    small = Image.frombytes("RGB", (9, 5), os.urandom(9 * 5 * 3))
    wanted, made = (one(small, return_tensors="np")["pixel_values"] for one in (plain, bounded))
    assert (made == wanted).all()
    assert bounded.to_json_string() == plain.to_json_string()
    assert type(bounded).__qualname__ == type(plain).__qualname__
    with pytest.raises(MemoryError):
        bounded(Image.new("RGB", (1, 1 << 15)))


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe"}')
    reader = ChildReader(tmp_path, PictureStore())
    for _ in range(2):
        with pytest.raises(ConfigError, match="holds no processor of pictures and text"):
            reader.read(png(8, 8))
    reader.close()
