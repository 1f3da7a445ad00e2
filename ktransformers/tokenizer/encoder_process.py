"""A process that turns texts into ids, so that a text which takes for ever can be given up: see pattern_limits.

Lines of JSON: the tokenizer, then texts in; ids or what went wrong out. It ends with its standard input, whatever it is
doing. Run as a file with the places to import from as arguments, for it needs one package of them all.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading


def _read(lines: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def main() -> None:
    """Serve until nobody asks."""
    lines = queue.SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_buffer(lines.get())
    while True:
        text, add_special_tokens = json.loads(lines.get())
        try:
            answer: object = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            answer = str(error)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]
    main()
