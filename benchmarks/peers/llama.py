"""llama.cpp (pip package llama-cpp-python) as a peer of the routed experts, in a process of its own.

Builds the routed experts the way llama.cpp's graphs do (mul_mat_id for gate, up and down, swiglu, weights, the sum as
adds of views) with the ggml libraries that the package ships, through their C interface: include/ggml.h, ggml-alloc.h,
ggml-backend.h of https://github.com/ggml-org/ggml. Weights lie in the buffer that llama.cpp itself would choose, which
may rearrange them. One graph holds all layers, so that threads start once per graph, as in a whole model. A question is
`TYPE TOKENS`, the answer microseconds per layer. Needs neither torch nor the package's Python code.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.base import PeerProcess, answer_questions
from benchmarks.peers.llama_library import library_folder, load_library, start_llama

__all__ = ["Ggml", "llama_peer"]

_F32, _I32, _BF16 = 0, 26, 30
_IQ1_M, _MXFP4, _NVFP4 = 29, 39, 40
# By ggml's number: where the fp16 numbers of a block are, unless at its start.
_SCALES_AT = {**dict.fromkeys((3, 7, 12, 13), (0, 2)), 10: (80, 82), 11: (108,), 14: (208,), 34: (52,), 35: (64,)}
# ggml type numbers of gate, up and down.
_TYPES = {"q4_k_m": (12, 12, 14), "q4_k": (12,) * 3, "q5_k": (13,) * 3, "q6_k": (14,) * 3, "q8_0": (8,) * 3}
_TYPES |= {"q4_0": (2,) * 3, "iq4_xs": (23,) * 3, "mxfp4": (39,) * 3, "bf16": (30,) * 3}
_TYPES |= {"q4_1": (3,) * 3, "q5_0": (6,) * 3, "q5_1": (7,) * 3, "q2_k": (10,) * 3, "q3_k": (11,) * 3}
_TYPES |= {"iq4_nl": (20,) * 3, "tq1_0": (34,) * 3, "tq2_0": (35,) * 3, "nvfp4": (40,) * 3}
_TYPES |= {"iq2_xxs": (16,) * 3, "iq2_xs": (17,) * 3, "iq3_xxs": (18,) * 3, "iq1_s": (19,) * 3, "iq3_s": (21,) * 3}
_TYPES |= {"iq2_s": (22,) * 3, "iq1_m": (29,) * 3, "q1_0": (41,) * 3}
_CPU_DEVICE = 0
_LOG_ERROR = 4

Bytes = npt.NDArray[np.uint8]


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


# name: (result, arguments). What ggml hands out are pointers that we never look into.
_P = c_void_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ggml_init": (_P, [_InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_log_set": (None, [_P, _P]),
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead_custom": (c_size_t, [c_size_t, c_bool]),
    "ggml_blck_size": (c_int64, [c_int]),
    "ggml_type_size": (c_size_t, [c_int]),
    "ggml_new_tensor_2d": (_P, [_P, c_int, c_int64, c_int64]),
    "ggml_new_tensor_3d": (_P, [_P, c_int, c_int64, c_int64, c_int64]),
    "ggml_view_2d": (_P, [_P, _P, c_int64, c_int64, c_size_t, c_size_t]),
    "ggml_mul_mat_id": (_P, [_P, _P, _P, _P]),
    "ggml_swiglu_split": (_P, [_P, _P, _P]),
    "ggml_mul": (_P, [_P, _P, _P]),
    "ggml_add": (_P, [_P, _P, _P]),
    "ggml_cont": (_P, [_P, _P]),
    "ggml_set_input": (None, [_P]),
    "ggml_set_output": (None, [_P]),
    "ggml_new_graph_custom": (_P, [_P, c_size_t, c_bool]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_gallocr_new": (_P, [_P]),
    "ggml_gallocr_free": (None, [_P]),
    "ggml_gallocr_alloc_graph": (c_bool, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_get_default_buffer_type": (_P, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_tensor_get": (None, [_P, _P, c_size_t, c_size_t]),
    "ggml_backend_graph_compute": (c_int, [_P, _P]),
    "ggml_backend_dev_init": (_P, [_P, c_char_p]),
    "ggml_backend_dev_backend_reg": (_P, [_P]),
    "ggml_backend_dev_supports_op": (c_bool, [_P, _P]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, c_char_p]),
}


def _log(level: int, text: bytes, _: object) -> None:
    """ggml tells of every tensor that it rearranges; only its errors are of interest here."""
    if level >= _LOG_ERROR:
        sys.stderr.write(text.decode(errors="replace"))


_LOG = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_void_p)(_log)  # kept as long as ggml may call it


def llama_peer(shape: dict[str, int], threads: int, seconds: float) -> PeerProcess:
    """Start the child. shape: the fields of benchmarks.kernels.measure.Shape; seconds: per figure."""
    return start_llama("benchmarks.peers.llama", {"shape": shape, "threads": threads, "seconds": seconds})


class Ggml:
    """ggml's C interface, whose functions are in `c` without their prefix, and its CPU backend with `threads`."""

    def __init__(self, folder: Path, threads: int):
        libraries = {name: load_library(name) for name in ("ggml-base", "ggml")}
        functions = {name: getattr(libraries["ggml-base"], name) for name in _FUNCTIONS}
        for name, (result, arguments) in _FUNCTIONS.items():
            functions[name].restype, functions[name].argtypes = result, arguments
        self.c: Any = SimpleNamespace(**{name.removeprefix("ggml_"): one for name, one in functions.items()})
        self.c.log_set(_LOG, None)
        # Packages may ship one library per instruction set; this loads the one that fits, or finds the one linked in.
        registry = libraries["ggml"]
        registry.ggml_backend_load_all_from_path.argtypes = [c_char_p]
        registry.ggml_backend_load_all_from_path(str(folder).encode())
        registry.ggml_backend_dev_by_type.restype = c_void_p
        self.device = registry.ggml_backend_dev_by_type(_CPU_DEVICE)
        self.backend = self.c.backend_dev_init(self.device, None)
        set_threads = self._address("ggml_backend_set_n_threads")
        ctypes.CFUNCTYPE(None, c_void_p, c_int)(set_threads)(self.backend, threads)
        self.default_buffer_type: int = self.c.backend_get_default_buffer_type(self.backend)

    def _address(self, name: str) -> Any:
        return self.c.backend_reg_get_proc_address(self.c.backend_dev_backend_reg(self.device), name.encode())

    def buffer_types(self) -> Iterator[int]:
        """Where weights may lie, best first: those that rearrange them, then plain memory."""
        address = self._address("ggml_backend_dev_get_extra_bufts")
        if address:
            extra = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.device)
            i = 0
            while extra and extra[i]:
                yield extra[i]
                i += 1
        yield self.default_buffer_type

    def context(self, num_tensors: int, graph_size: int = 0) -> int:
        """A ggml_context for the headers of tensors, and of a graph."""
        nbytes = num_tensors * self.c.tensor_overhead()
        if graph_size:
            nbytes += self.c.graph_overhead_custom(graph_size, False)
        context: int = self.c.init(_InitParams(nbytes, None, True))
        return context

    def set(self, tensor: int, values: npt.NDArray[Any]) -> None:
        """Fill a tensor that has memory."""
        values = np.ascontiguousarray(values)
        self.c.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


def random_blocks(kind: int, count: int, block: int, nbytes: int, rng: np.random.Generator) -> Bytes:
    """`count` random weights of a ggml type, their scales small numbers."""
    if kind == _BF16:
        values = rng.standard_normal(count, dtype=np.float32) * np.float32(0.02)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = rng.integers(0, 256, size=(count // block, nbytes), dtype=np.uint8)
    if kind == _MXFP4:
        blocks[:, 0] = 117  # 2^-11
    elif kind == _IQ1_M:  # the scale's four nibbles are the upper ones of four words
        blocks[:, 53] = blocks[:, 53] & 0x0F | 0x40
        blocks[:, 55] &= 0x0F
    elif kind == _NVFP4:
        blocks[:, :4] = 0x01  # 2^-10
    else:
        for at in _SCALES_AT.get(kind, (0,)):
            blocks[:, at + 1] = 0x04  # the high byte of an fp16 scale: about 1e-4
    return blocks.reshape(-1)


class _Weights:
    """gate, up and down of one layer."""

    def __init__(self, ggml: Ggml, kinds: tuple[int, ...], shape: dict[str, int], rng: np.random.Generator):
        self._ggml, self._top_k = ggml, shape["top_k"]
        self._contexts: list[int] = []
        self._buffers: list[int] = []
        experts, hidden, width = shape["experts"], shape["hidden"], shape["width"]
        sizes = ((hidden, width), (hidden, width), (width, hidden))
        self.tensors = [self._new(kind, *size, experts) for kind, size in zip(kinds, sizes, strict=True)]
        for kind, tensor in zip(kinds, self.tensors, strict=True):
            count = experts * hidden * width
            ggml.set(tensor, random_blocks(kind, count, ggml.c.blck_size(kind), ggml.c.type_size(kind), rng))

    def _new(self, kind: int, cols: int, rows: int, experts: int) -> int:
        """A tensor in the first buffer type whose mul_mat_id is there."""
        ggml = self._ggml
        for buffer_type in ggml.buffer_types():
            context, probe = ggml.context(1), ggml.context(8)
            tensor: int = ggml.c.new_tensor_3d(context, kind, cols, rows, experts)
            buffer = ggml.c.backend_alloc_ctx_tensors_from_buft(context, buffer_type)
            inputs = ggml.c.new_tensor_3d(probe, _F32, cols, self._top_k, 512)
            ids = ggml.c.new_tensor_2d(probe, _I32, self._top_k, 512)
            product = ggml.c.mul_mat_id(probe, tensor, inputs, ids)
            is_fitting = bool(buffer) and ggml.c.backend_dev_supports_op(ggml.device, product)
            ggml.c.free(probe)
            if is_fitting:
                self._contexts.append(context)
                self._buffers.append(buffer)
                return tensor
            ggml.c.free(context)
            if buffer:
                ggml.c.backend_buffer_free(buffer)
        raise RuntimeError(f"ggml's CPU backend does not multiply type {kind}")

    def close(self) -> None:
        for context in self._contexts:
            self._ggml.c.free(context)
        for buffer in self._buffers:
            self._ggml.c.backend_buffer_free(buffer)


class _Graph:
    """All layers for a number of tokens, each on the same hidden states."""

    def __init__(self, ggml: Ggml, layers: list[_Weights], shape: dict[str, int], tokens: int):
        self._ggml, self.shape, self.tokens = ggml, shape, tokens
        num_nodes = len(layers) * (8 + 2 * shape["top_k"]) + 8
        self._context = ggml.context(2 * num_nodes, 2 * num_nodes)
        self.graph: int = ggml.c.new_graph_custom(self._context, 2 * num_nodes, False)
        self.rows: int = ggml.c.new_tensor_3d(self._context, _F32, shape["hidden"], 1, tokens)
        ggml.c.set_input(self.rows)
        self.ids: list[int] = []
        self.weights: list[int] = []
        self.outputs = [self._layer(layer.tensors) for layer in layers]
        self._allocator = ggml.c.gallocr_new(ggml.default_buffer_type)
        if not ggml.c.gallocr_alloc_graph(self._allocator, self.graph):
            raise RuntimeError("ggml found no memory for its activations")

    def _layer(self, tensors: list[int]) -> int:
        ggml, context, shape = self._ggml, self._context, self.shape
        hidden, top_k, tokens = shape["hidden"], shape["top_k"], self.tokens
        ids = ggml.c.new_tensor_2d(context, _I32, top_k, tokens)
        weights = ggml.c.new_tensor_3d(context, _F32, 1, top_k, tokens)
        for tensor in (ids, weights):
            ggml.c.set_input(tensor)
        self.ids.append(ids)
        self.weights.append(weights)
        up = ggml.c.mul_mat_id(context, tensors[1], self.rows, ids)
        gate = ggml.c.mul_mat_id(context, tensors[0], self.rows, ids)
        down = ggml.c.mul_mat_id(context, tensors[2], ggml.c.swiglu_split(context, gate, up), ids)
        weighted = ggml.c.mul(context, down, weights)  # [hidden, top_k, tokens], the first runs fastest
        ggml.c.build_forward_expand(self.graph, weighted)
        row = hidden * 4
        views = [ggml.c.view_2d(context, weighted, hidden, tokens, top_k * row, k * row) for k in range(top_k)]
        total: int = views[0] if top_k > 1 else ggml.c.cont(context, views[0])
        for view in views[1:]:
            total = ggml.c.add(context, total, view)
        ggml.c.set_output(total)
        ggml.c.build_forward_expand(self.graph, total)
        return total

    def compute(self) -> float:
        """Seconds that the graph took."""
        began = time.perf_counter()
        status = self._ggml.c.backend_graph_compute(self._ggml.backend, self.graph)
        took = time.perf_counter() - began
        if status != 0:
            raise RuntimeError(f"ggml's graph failed with status {status}")
        return took

    def output(self, layer: int) -> npt.NDArray[np.float32]:
        """What a layer made, fp32 [tokens, hidden]."""
        values = np.empty((self.tokens, self.shape["hidden"]), dtype=np.float32)
        self._ggml.c.backend_tensor_get(self.outputs[layer], values.ctypes.data, 0, values.nbytes)
        return values

    def close(self) -> None:
        self._ggml.c.gallocr_free(self._allocator)
        self._ggml.c.free(self._context)


class LlamaExperts:
    """The child's side: measures `shape` (see benchmarks.kernels.measure.Shape) for `seconds` per figure."""

    def __init__(self, ggml: Ggml, shape: dict[str, int], seconds: float):
        self._ggml, self._shape, self._seconds = ggml, shape, seconds
        self._rng = np.random.default_rng(0)
        self._name, self._layers = "", list[_Weights]()

    def _load(self, name: str) -> None:
        for layer in self._layers:
            layer.close()
        self._name, num_layers = name, self._shape["layers"]
        self._layers = [_Weights(self._ggml, _TYPES[name], self._shape, self._rng) for _ in range(num_layers)]

    @contextmanager
    def graph(self, name: str, tokens: int) -> Iterator[_Graph]:
        """The graph for a type and a token count, its hidden states filled."""
        if name != self._name:
            self._load(name)
        graph = _Graph(self._ggml, self._layers, self._shape, tokens)
        try:
            self._ggml.set(graph.rows, self._rng.standard_normal((tokens, self._shape["hidden"]), dtype=np.float32))
            yield graph
        finally:
            graph.close()

    def route(self, graph: _Graph) -> None:
        """New experts and weights for every layer."""
        shape, tokens = self._shape, graph.tokens
        for ids, weights in zip(graph.ids, graph.weights, strict=True):
            chosen = self._rng.random((tokens, shape["experts"])).argsort(-1)[:, : shape["top_k"]]
            self._ggml.set(ids, chosen.astype(np.int32))
            self._ggml.set(weights, self._rng.random((tokens, shape["top_k"]), dtype=np.float32))

    def measure(self, name: str, tokens: int) -> float:
        """Microseconds per layer, mean."""
        with self.graph(name, tokens) as graph:
            self.route(graph)
            graph.compute()
            total, count, began = 0.0, 0, time.perf_counter()
            while count < 2 or time.perf_counter() - began < self._seconds:
                self.route(graph)
                total += graph.compute()
                count += 1
        return total / count / self._shape["layers"] * 1e6

    def answer(self, words: list[str]) -> float | None:
        """See peers.base.answer_questions."""
        return self.measure(words[0], int(words[1])) if words[0] in _TYPES else None


def main() -> None:
    """The child: answers questions until its input ends."""
    options = json.loads(sys.argv[1])
    folder = library_folder()
    assert folder is not None
    answer_questions(LlamaExperts(Ggml(folder, options["threads"]), options["shape"], options["seconds"]).answer)


if __name__ == "__main__":
    main()
