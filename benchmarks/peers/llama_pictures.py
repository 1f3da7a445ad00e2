"""llama.cpp's mtmd (pip package llama-cpp-python) as a peer for the first token behind a picture, in its own process.

Speaks to the C interfaces of https://github.com/ggml-org/llama.cpp through the package's ctypes declarations, with
llama.cpp's own defaults but for threads and sizes. A question is the path of a picture, or `again` for the next turn of
the conversation about the last one; the answer is the seconds until the first token. `part NAME` then asks for a part
of them, see PARTS, `part token` for the token.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from benchmarks.peers.base import PeerProcess, answer_questions
from benchmarks.peers.llama_library import start_llama
from benchmarks.peers.llama_model import ALL_LAYERS, GPU_CHUNK, in_ram, quiet_log

__all__ = ["PARTS", "PictureWork", "llama_pictures_peer"]

PARTS = ("read", "tower", "text")
"""Decoding, resizing and normalizing; the tower; the language model and sampling."""

_IMAGE = 1  # MTMD_INPUT_CHUNK_TYPE_IMAGE
_CPU_CHUNK = 512

_T = TypeVar("_T")
Handle = int
"""A pointer of llama.cpp's."""


@dataclass(frozen=True, slots=True)
class PictureWork:
    """model, tower: the GGUF files. before, behind: the prompt around a picture; again: behind the answer, the next
    turn. context: tokens. cpu_experts: layers whose routed experts stay in RAM while all else goes to the GPU; None:
    the CPU alone. has_gpu_tower: whether the tower is on the GPU."""

    model: str
    tower: str
    threads: int
    before: str
    behind: str
    again: str
    context: int
    cpu_experts: Sequence[int] | None = None
    has_gpu_tower: bool = False


def llama_pictures_peer(work: PictureWork) -> PeerProcess:
    """Start the child, which loads the files."""
    return start_llama("benchmarks.peers.llama_pictures", asdict(work))


class _Child:
    """The child's side."""

    def __init__(self, work: PictureWork):
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]
        from llama_cpp import mtmd_cpp  # type: ignore[import-not-found, unused-ignore]

        self._lc: ModuleType = llama_cpp
        self._mtmd: ModuleType = mtmd_cpp
        self._work, self._seconds = work, dict.fromkeys(PARTS, 0.0)
        if work.cpu_experts is None:  # built for GPUs, it computes long prompts there all the same
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        llama_cpp.llama_backend_init()
        self._log = llama_cpp.llama_log_callback(quiet_log)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        mtmd_cpp.mtmd_helper_log_set(self._log, ctypes.c_void_p(0))
        self._model = self._loaded()
        self._context = self._opened()
        self._tower = self._opened_tower()
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._past = self._token = 0

    def _loaded(self) -> Handle:
        lc, work = self._lc, self._work
        params = lc.llama_model_default_params()
        params.n_gpu_layers = ALL_LAYERS if work.cpu_experts is not None else 0
        self._overrides = in_ram(work.cpu_experts or [])  # llama.cpp reads them until the model is loaded
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        model: Handle = lc.llama_model_load_from_file(work.model.encode(), params)
        if not model:
            raise SystemExit(f"llama.cpp cannot load {work.model}")
        return model

    def _opened(self) -> Handle:
        lc, work = self._lc, self._work
        params = lc.llama_context_default_params()
        params.n_ctx = params.n_batch = work.context
        params.n_ubatch = GPU_CHUNK if work.cpu_experts is not None else _CPU_CHUNK
        params.n_threads = params.n_threads_batch = work.threads
        context: Handle = lc.llama_init_from_model(self._model, params)
        if not context:
            raise SystemExit(f"llama.cpp has no memory for {work.context} tokens")
        return context

    def _opened_tower(self) -> Handle:
        params = self._mtmd.mtmd_context_params_default()
        params.use_gpu, params.n_threads = self._work.has_gpu_tower, self._work.threads
        params.print_timings = False
        tower: Handle = self._mtmd.mtmd_init_from_file(self._work.tower.encode(), self._model, params)
        if not tower:
            raise SystemExit(f"llama.cpp cannot load {self._work.tower}")
        return tower

    def _timed(self, part: str, call: Callable[[], _T]) -> _T:
        """What `call` returns; its seconds are added to a part."""
        began = time.perf_counter()
        found = call()
        self._lc.llama_synchronize(self._context)
        self._seconds[part] += time.perf_counter() - began
        return found

    def first_token(self, path: str | None) -> float:
        """Seconds until the first token behind a picture; None: of the next turn, which has no other one."""
        lc, mtmd = self._lc, self._mtmd
        self._seconds = dict.fromkeys(PARTS, 0.0)
        bitmaps = []
        if path is not None:
            lc.llama_memory_clear(lc.llama_get_memory(self._context), True)
            self._past = 0
            bitmaps.append(
                self._timed("read", lambda: mtmd.mtmd_helper_bitmap_init_from_file(self._tower, path.encode(), False))
            )
            if not bitmaps[0]:
                raise SystemExit(f"llama.cpp cannot read {path}")
        chunks = mtmd.mtmd_input_chunks_init()
        self._timed("read", lambda: self._tokenize(chunks, bitmaps))
        count = mtmd.mtmd_input_chunks_size(chunks)
        for index in range(count):
            self._evaluate(mtmd.mtmd_input_chunks_get(chunks, index), is_last=index == count - 1)
        self._token = self._timed("text", lambda: lc.llama_sampler_sample(self._sampler, self._context, -1))
        mtmd.mtmd_input_chunks_free(chunks)
        for bitmap in bitmaps:
            mtmd.mtmd_bitmap_free(bitmap)
        return sum(self._seconds.values())

    def _tokenize(self, chunks: Handle, bitmaps: Sequence[Handle]) -> None:
        mtmd, work = self._mtmd, self._work
        marker = mtmd.mtmd_default_marker().decode()
        text = f"{work.before}{marker}{work.behind}" if bitmaps else work.again
        given = mtmd.mtmd_input_text(text.encode(), len(text.encode()), False, True)
        array = (mtmd.mtmd_bitmap_p_ctypes * max(len(bitmaps), 1))(*bitmaps)
        status = mtmd.mtmd_tokenize(self._tower, chunks, ctypes.byref(given), array, len(bitmaps))
        if status:
            raise SystemExit(f"mtmd_tokenize failed with status {status}")

    def _evaluate(self, chunk: Handle, *, is_last: bool) -> None:
        """What mtmd_helper_eval_chunks does with each chunk."""
        mtmd, past = self._mtmd, self._lc.llama_pos(self._past)
        size, place = self._work.context, ctypes.byref(past)
        if mtmd.mtmd_input_chunk_get_type(chunk) == _IMAGE:
            status = self._timed("tower", lambda: mtmd.mtmd_encode_chunk(self._tower, chunk))
            rows = mtmd.mtmd_get_output_embd(self._tower)
            given = self._tower, self._context, chunk, rows, self._past, 0, size, place
            nothing = mtmd.mtmd_helper_post_decode_callback(), None
            status = status or self._timed("text", lambda: mtmd.mtmd_helper_decode_image_chunk(*given, *nothing))
        else:
            options = self._tower, self._context, chunk, self._past, 0, size, is_last, place
            status = self._timed("text", lambda: mtmd.mtmd_helper_eval_chunk_single(*options))
        if status:
            raise SystemExit(f"llama.cpp failed with status {status}")
        self._past = past.value

    def answer(self, words: list[str]) -> float | None:
        """See peers.base.answer_questions."""
        if words[0] == "part":
            return self._token if words[1] == "token" else self._seconds.get(words[1])
        return self.first_token(None if words[0] == "again" else words[0])


def main() -> None:
    """The child: answers questions until its input ends."""
    given = json.loads(sys.argv[1])
    for name in ("model", "tower"):
        if not Path(given[name]).is_file():
            raise SystemExit(f"there is no {given[name]}")
    answer_questions(_Child(PictureWork(**given)).answer)


if __name__ == "__main__":
    main()
