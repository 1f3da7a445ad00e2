"""llama.cpp (pip package llama-cpp-python) as a peer of whole models, in a process of its own.

Speaks to llama.cpp's C interface (include/llama.h of https://github.com/ggml-org/llama.cpp) through the package's
ctypes declarations, with llama.cpp's own defaults but for threads and sizes. Questions are `prefill TOKENS` and
`decode SEQUENCES`, answers tokens per second. Sampling is not counted.
"""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ktransformers.bench.peers.base import PeerProcess, answer_questions
from ktransformers.bench.peers.llama import start_llama
from ktransformers.bench.work import ModelWork

__all__ = ["llama_model_peer"]

_LOG_ERROR = 4
_ROUNDING = 256  # llama.cpp rounds a sequence's cache up to this

Entry = tuple[int, int, int, bool]
"""Token id, position, sequence, whether its logits are wanted."""


def llama_model_peer(path: Path, threads: int, vocab_size: int, work: ModelWork) -> PeerProcess:
    """Start the child, which loads the GGUF at `path`. Token ids are drawn below vocab_size."""
    options = {"path": str(path), "threads": threads, "vocab_size": vocab_size, "work": asdict(work)}
    return start_llama("ktransformers.bench.peers.llama_model", options)


class _Child:
    """The child's side."""

    def __init__(self, options: dict[str, Any]):
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self._lc: Any = llama_cpp
        self._work, self._threads = ModelWork(**options["work"]), options["threads"]
        self._rng = random.Random(0)
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options["path"].encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {options['path']}")
        known = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._vocab_size = min(options["vocab_size"], known) if known > 0 else options["vocab_size"]

    @contextmanager
    def _context(self, sequences: int, length: int) -> Iterator[Any]:
        """A context for `sequences` of up to `length` tokens."""
        lc, params = self._lc, self._lc.llama_context_default_params()
        params.n_ctx = sequences * -(-length // _ROUNDING) * _ROUNDING
        params.n_batch = params.n_ctx
        params.n_seq_max = sequences
        params.n_threads = params.n_threads_batch = self._threads
        context = lc.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp has no memory for {params.n_ctx} tokens")
        try:
            yield context
        finally:
            lc.llama_free(context)

    def _run(self, context: Any, entries: Sequence[Entry]) -> float:
        """Seconds that one batch took."""
        lc = self._lc
        batch = lc.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, is_wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, is_wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        began = time.perf_counter()
        status = lc.llama_decode(context, batch)
        lc.llama_synchronize(context)
        took = time.perf_counter() - began
        lc.llama_batch_free(batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status}")
        return took

    def _token(self) -> int:
        return self._rng.randrange(self._vocab_size)

    def _prompt(self, sequence: int, length: int) -> list[Entry]:
        return [(self._token(), i, sequence, i == length - 1) for i in range(length)]

    def prefill(self, tokens: int) -> float:
        """Tokens per second of one prompt."""
        with self._context(1, tokens) as context:
            return tokens / self._run(context, self._prompt(0, tokens))

    def decode(self, sequences: int) -> float:
        """Tokens per second of all sequences together, mean over the steps."""
        work = self._work
        with self._context(sequences, work.sequence_len) as context:
            for sequence in range(sequences):
                self._run(context, self._prompt(sequence, work.context))
            took = [
                self._run(context, [(self._token(), work.context + i, sequence, True) for sequence in range(sequences)])
                for i in range(work.warm_ups + work.steps)
            ]
        return sequences * work.steps / sum(took[work.warm_ups :])

    def answer(self, words: list[str]) -> float | None:
        """See peers.base.answer_questions."""
        return self.prefill(int(words[1])) if words[0] == "prefill" else self.decode(int(words[1]))


def _log(level: int, text: bytes, _: object) -> None:
    if level >= _LOG_ERROR and text.strip():
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """The child: answers questions until its input ends."""
    answer_questions(_Child(json.loads(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
