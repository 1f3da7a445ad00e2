"""llama.cpp (pip package llama-cpp-python) as a peer of whole models, in a process of its own.

Speaks to llama.cpp's C interface (include/llama.h of https://github.com/ggml-org/llama.cpp) through the package's
ctypes declarations, with llama.cpp's own defaults but for threads and sizes. Questions are `prefill TOKENS` and
`decode SEQUENCES`, answers tokens per second. Sampling is not counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.base import PeerProcess, answer_questions
from benchmarks.peers.llama_library import load_library, start_llama
from benchmarks.peers.work import ModelWork

__all__ = ["ALL_LAYERS", "GPU_CHUNK", "in_ram", "llama_model_peer", "mapped_llama_peer", "quiet_log"]

_LOG_ERROR = 4
_ROUNDING = 256  # llama.cpp rounds a sequence's cache up to this
ALL_LAYERS = 9999
GPU_CHUNK = 2048
"""Rows of a step: weights that go to the GPU for a prompt's step pay the more, the more rows there are. llama.cpp's own
default of 512 is slower for it."""

Entry = tuple[int, int, int, bool]
"""Token id, position, sequence, whether its logits are wanted."""


def llama_model_peer(
    path: Path, threads: int, vocab_size: int, work: ModelWork, cpu_experts: Sequence[int] | None = None
) -> PeerProcess:
    """Start the child, which loads the GGUF at `path`. Token ids are drawn below vocab_size.

    cpu_experts: layers whose routed experts stay in RAM while all else goes to the GPU; None: the CPU alone.
    """
    return start_llama("benchmarks.peers.llama_model", _options(path, threads, vocab_size, work, cpu_experts))


def mapped_llama_peer(
    path: Path, threads: int, vocab_size: int, work: ModelWork, within: Callable[..., list[str]]
) -> PeerProcess:
    """Start the child with all weights in the mapped file, on the CPU. within: see start_llama.

    By default llama.cpp copies those that it rearranges for the CPU (its flag is --no-repack): more than memory holds.
    Its threads wait for each other without spinning: one that waits for the disk keeps the others waiting for long, and
    beside other programs spinning costs it most of its speed. GOMP_SPINCOUNT chooses another way.
    """
    options = _options(path, threads, vocab_size, work, None) | {"is_mapped": True}
    spin = f"GOMP_SPINCOUNT={os.environ.get('GOMP_SPINCOUNT', '0')}"
    return start_llama("benchmarks.peers.llama_model", options, partial(within, "env", spin))


def _options(
    path: Path, threads: int, vocab_size: int, work: ModelWork, cpu_experts: Sequence[int] | None
) -> dict[str, object]:
    options: dict[str, object] = {"path": str(path), "threads": threads, "vocab_size": vocab_size, "work": asdict(work)}
    options["cpu_experts"] = None if cpu_experts is None else list(cpu_experts)
    return options


class _Child:
    """The child's side."""

    def __init__(self, options: dict[str, Any]):
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self._lc: Any = llama_cpp
        self._work, self._threads = ModelWork(**options["work"]), options["threads"]
        self._rng = random.Random(0)
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(quiet_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        self._is_on_gpu = options["cpu_experts"] is not None
        params.n_gpu_layers = ALL_LAYERS if self._is_on_gpu else 0
        params.use_extra_bufts = not options.get("is_mapped")
        self._overrides = in_ram(options["cpu_experts"] or [])  # llama.cpp reads them until the model is loaded
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
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
        if self._is_on_gpu:
            params.n_ubatch = GPU_CHUNK
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


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override: a pattern of names, and where those tensors lie."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def in_ram(layers: Sequence[int]) -> ctypes.Array[_Override]:
    """What llama.cpp's --n-cpu-moe does: these layers' routed experts in plain memory of the CPU."""
    if not layers:
        return (_Override * 1)(_Override(None, None))
    base = load_library("ggml-base")
    base.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    there = base.ggml_backend_cpu_buffer_type()
    patterns = [rf"blk\.{layer}\.ffn_(up|down|gate|gate_up)_(ch|)exps".encode() for layer in layers]
    return (_Override * (len(patterns) + 1))(*(_Override(one, there) for one in patterns), _Override(None, None))


def quiet_log(level: int, text: bytes, _: object) -> None:
    """What llama.cpp logs: its errors only, not the dots of its progress, whose level is above theirs."""
    if level == _LOG_ERROR and text.strip():
        sys.stderr.write(text.decode(errors="replace"))


def main() -> None:
    """The child: answers questions until its input ends."""
    answer_questions(_Child(json.loads(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
