"""The process that turns texts into ids, so that a text which takes for ever can be given up: see pattern_limits.

Frames of JSON, see system/asked_process.py: the tokenizer, then texts in; ids or what went wrong out. Run as a file
with the places to import from as arguments, for it needs one package of them all.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import struct
import sys
import threading

_MOST_NBYTES = 1 << 30
"""Of memory beside the tokenizer itself, for one text."""

_HEADER = struct.Struct("<I")


def _read(questions: queue.SimpleQueue[bytes]) -> None:
    while len(header := sys.stdin.buffer.read(_HEADER.size)) == _HEADER.size:
        questions.put(sys.stdin.buffer.read(*_HEADER.unpack(header)))
    os._exit(0)


def _answer(value: object) -> None:
    data = json.dumps(value).encode()
    sys.stdout.buffer.write(_HEADER.pack(len(data)) + data)
    sys.stdout.buffer.flush()


def _limit_memory() -> None:
    """Of what this process writes to: beyond it the library gives up, and the process with it."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[5]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return  # not Linux, where this limit means something else
    _, most = resource.getrlimit(resource.RLIMIT_DATA)
    wanted = now + _MOST_NBYTES
    resource.setrlimit(resource.RLIMIT_DATA, (wanted if most < 0 else min(wanted, most), most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Encode texts from standard input until it ends."""
    questions = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(questions.get())
    _limit_memory()
    _answer([])
    while True:
        text, add_special_tokens = json.loads(questions.get())
        try:
            answer: object = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            answer = str(error)
        _answer(answer)


if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]
    main()
