"""The child process that decodes pictures and runs the model's processor: a fault in either ends one request.

    Setup ──> ProcessorOpened | Fault        then, for each picture: Question ──> Read | Fault, and a file in the store

Its memory and its processor time are limited; beyond them it dies, and its parent starts another one.
"""

from __future__ import annotations

import io
import os
import queue
import resource
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ktransformers.errors import ConfigError
from ktransformers.media.messages import Answer, Fault, ProcessorOpened, Question, Read, Setup
from ktransformers.system.child import become, framed, frames_of, run_aside

if TYPE_CHECKING:
    from ktransformers.media.processing import Processed, Processor

__all__ = ["main"]

_MOST_NBYTES = 6 << 30
"""Of address space beside what the processor itself takes, for one picture: the largest in float32, some copies."""

_START_NICENESS = 10
"""While it starts, a tenth of a core that others want: slow, but no picture waits too long for a start."""

_FIRST_SIDE = 256

_CPU_SECONDS = 60
"""Of processor time, for one picture."""


def main() -> None:
    """Read pictures that come on standard input until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no answer
    become("kt-pictures")
    os.umask(0o077)
    os.nice(5)  # steps of the model come first
    for answer in _answers(frames_of(sys.stdin.buffer)):
        answers.write(framed(msgspec.msgpack.encode(answer)))
        answers.flush()


def _answers(questions: queue.SimpleQueue[bytes]) -> Iterator[Answer]:
    setup = msgspec.msgpack.decode(questions.get(), type=Setup)
    notes = list[str]()
    try:
        processor = run_aside(partial(_opened, setup, notes), _START_NICENESS)
    except (ConfigError, ImportError) as error:
        yield Fault(str(error))
        return
    yield ProcessorOpened(processor.placeholder, tuple(processor.position_token_ids), tuple(notes))
    _limit(resource.RLIMIT_CORE, 0)
    _limit_memory()
    while True:
        question = msgspec.msgpack.decode(questions.get(), type=Question)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + _CPU_SECONDS)
        try:
            yield _read(processor, Path(setup.store), question)
        except ConfigError as error:
            yield Fault(str(error))
        except MemoryError:
            yield Fault(f"the picture takes more than {_MOST_NBYTES >> 30} GiB to be read: make it smaller")


def _opened(setup: Setup, notes: list[str]) -> Processor:
    """The processor, which has made a first picture: the libraries import much of themselves for that only."""
    import safetensors.torch  # noqa: F401 - which writes files
    from PIL import Image

    from ktransformers.media.decoding import decode
    from ktransformers.media.processing import Processor

    processor = Processor(Path(setup.folder), notes.append, setup.tower)
    drawn = io.BytesIO()
    Image.new("RGB", (_FIRST_SIDE, _FIRST_SIDE)).save(drawn, "TIFF")  # the one of the formats that Pillow tries last
    try:
        processor.process(decode(drawn.getvalue(), notes.append), "auto")
    except ConfigError as error:
        notes.append(f"a picture of one colour cannot be read, others may: {error}")
    return processor


def _read(processor: Processor, store: Path, question: Question) -> Read:
    from ktransformers.media.decoding import decode

    notes = list[str]()
    image = decode(question.data, notes.append)
    made = processor.process(image, question.detail)
    nbytes = _write(made, store)
    width, height = image.size
    notes_made, margins = tuple(notes), (made.lead, made.trail)
    return Read(made.digest, made.text, made.num_positions, width, height, nbytes, notes_made, *margins, made.closing)


def _write(made: Processed, store: Path) -> int:
    """Write the picture's file, whole or not at all; return its bytes. Raises ConfigError when there is no room."""
    from safetensors.torch import save_file

    path = store / f"{made.digest.hex()}.safetensors"
    rest = store / f".{made.digest.hex()}.{os.getpid()}.new"
    try:
        save_file(dict(made.tensors), rest, metadata={"kind": "image"})
        rest.replace(path)
        return path.stat().st_size
    except Exception as error:  # of safetensors, which has its own for a disk that is full
        rest.unlink(missing_ok=True)
        raise ConfigError(f"the picture cannot be kept in {store}: {error}") from error


def _limit(kind: int, wanted: int) -> None:
    _, most = resource.getrlimit(kind)
    resource.setrlimit(kind, (wanted if most < 0 else min(wanted, most), most))


def _limit_memory() -> None:
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return  # not Linux, where this limit means something else
    _limit(resource.RLIMIT_AS, now + _MOST_NBYTES)
