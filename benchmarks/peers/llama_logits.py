"""llama.cpp's logits of given texts (pip package llama-cpp-python), computed in a process of its own.

Its keys and values are kept in fp32, unlike its default of fp16, so that what it loses is what its products with
quantized weights lose. On the CPU, in one batch a text. The question is `logits`, the answer the number of rows.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import answer_questions
from benchmarks.peers.llama_library import start_llama
from benchmarks.peers.llama_model import quiet_log

__all__ = ["llama_logits"]

_F32 = 0  # enum ggml_type
_NO_FLASH = 0  # enum llama_flash_attn_type


def llama_logits(path: Path, texts: Sequence[Sequence[int]], threads: int) -> list[npt.NDArray[np.float32]] | None:
    """fp32 [T, V] of each text; None where the child ended early, which is said in one printed line."""
    with tempfile.TemporaryDirectory(prefix="ktransformers-logits-") as folder:
        options = {"path": str(path), "threads": threads, "texts": [list(text) for text in texts], "folder": folder}
        child = start_llama("benchmarks.peers.llama_logits", options)
        try:
            if child.ask("logits") is None:
                return None
        finally:
            child.close()
        return [np.load(Path(folder) / f"{index}.npy") for index in range(len(texts))]


class _Child:
    """The child's side: writes the logits of text i to i.npy in options' folder."""

    def __init__(self, options: dict[str, Any]):
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self._lc: Any = llama_cpp
        self._options = options
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(quiet_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(options["path"].encode(), params)
        if not self._model:
            raise SystemExit(f"llama.cpp cannot load {options['path']}")
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def _logits(self, text: Sequence[int]) -> npt.NDArray[np.float32]:
        """fp32 [T, V]."""
        lc, params = self._lc, self._lc.llama_context_default_params()
        params.n_ctx = params.n_batch = len(text)
        params.n_threads = params.n_threads_batch = self._options["threads"]
        params.type_k = params.type_v = _F32
        params.flash_attn_type = _NO_FLASH
        context = lc.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp has no memory for {len(text)} tokens")
        batch = lc.llama_batch_init(len(text), 0, 1)
        batch.n_tokens = len(text)
        for position, token in enumerate(text):
            batch.token[position], batch.pos[position], batch.logits[position] = token, position, True
            batch.n_seq_id[position], batch.seq_id[position][0] = 1, 0
        status = lc.llama_decode(context, batch)
        if status != 0:
            raise SystemExit(f"llama_decode failed with status {status}")
        shape = (len(text), self._vocab_size)
        found = np.ctypeslib.as_array(lc.llama_get_logits(context), shape=shape).copy()
        lc.llama_batch_free(batch)
        lc.llama_free(context)
        return found.astype(np.float32, copy=False)

    def answer(self, words: list[str]) -> float | None:
        """See peers.base.answer_questions."""
        if words != ["logits"]:
            return None
        texts = self._options["texts"]
        for index, text in enumerate(texts):
            np.save(Path(self._options["folder"]) / f"{index}.npy", self._logits(text))
        return float(sum(map(len, texts)))


def main() -> None:
    """The child: answers questions until its input ends."""
    answer_questions(_Child(json.loads(sys.argv[1])).answer)


if __name__ == "__main__":
    main()
