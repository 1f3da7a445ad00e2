"""kt-kernel (pip package of the SGLang integration) as a peer of the routed experts, in a process of its own.

A question is `TYPE TOKENS`, the answer microseconds per layer.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from benchmarks.peers.base import PeerProcess, answer_questions, mean_time

__all__ = ["kt_kernel_peer"]

# ggml type numbers of gate, up and down.
_GGML = {"q4_k_m": (12, 12, 14), "q4_k": (12, 12, 12), "q8_0": (8, 8, 8), "bf16": (30, 30, 30), "q6_k": (14, 14, 14)}
_BLOCKS = {12: (256, 144), 14: (256, 210), 8: (32, 34)}
# Its own formats, which it makes from BF16 weights: class names.
_OWN = {"amx_int4": "AMXInt4_MOE", "amx_int8": "AMXInt8_MOE", "amx_bf16": "AMXBF16_MOE"}


def kt_kernel_peer(shape: dict[str, int], threads: int, seconds: float) -> PeerProcess:
    """Start the child. shape: the fields of benchmarks.kernels.measure.Shape; seconds: per figure."""
    # It hands out one thread more than it is told to use.
    options = json.dumps({"shape": shape, "threads": max(threads - 1, 1), "seconds": seconds})
    return PeerProcess("kt-kernel", [sys.executable, "-m", "benchmarks.peers.kt_kernel", options])


class _Child:
    """The child's side."""

    def __init__(self, options: dict[str, Any]):
        from kt_kernel import kt_kernel_ext  # type: ignore[import-not-found, unused-ignore]

        self._kt, self._shape, self._seconds = kt_kernel_ext, options["shape"], options["seconds"]
        pool = kt_kernel_ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [options["threads"]]
        self._cpu = kt_kernel_ext.CPUInfer(pool)
        self._name, self._layers, self._keep = "", list[Any](), list[Any]()

    def _load(self, name: str) -> None:
        import torch

        kt, shape = self._kt, self._shape
        experts, hidden, width = shape["experts"], shape["hidden"], shape["width"]
        self._layers, self._keep, self._name = [], [], name
        ident = torch.arange(experts, dtype=torch.int64)
        if name in _OWN:
            self._load_own(name, ident)
            return
        for _ in range(shape["layers"]):
            config = kt.moe.MOEConfig(experts, shape["top_k"], hidden, width)
            config.pool, config.max_len, config.m_block = self._cpu.backend_, 4096, 32
            config.group_min_len, config.group_max_len, config.hidden_type = 10, 2048, 30
            sizes = ((experts * width, hidden), (experts * width, hidden), (experts * hidden, width))
            weights = [_random(rows * cols, kind) for kind, (rows, cols) in zip(_GGML[name], sizes, strict=True)]
            config.gate_type, config.up_type, config.down_type = _GGML[name]
            config.gate_proj, config.up_proj, config.down_proj = (weight.data_ptr() for weight in weights)
            layer = kt.moe.MOE(config)
            try:
                task = layer.load_weights_task()
            except TypeError:  # newer versions want to know where each expert is
                task = layer.load_weights_task(ident.data_ptr())
            self._cpu.submit(task)
            self._cpu.sync()
            self._layers.append(layer)
            self._keep.append((weights, ident))

    def _load_own(self, name: str, ident: Any) -> None:
        """Layers in one of its own formats; the BF16 weights are dropped once converted."""
        import torch

        kt, shape = self._kt, self._shape
        experts, hidden, width = shape["experts"], shape["hidden"], shape["width"]
        for _ in range(shape["layers"]):
            config = kt.moe.MOEConfig(experts, shape["top_k"], hidden, width, 0)
            config.max_len, config.pool = 4096, self._cpu.backend_
            sizes = ((experts, width, hidden), (experts, width, hidden), (experts, hidden, width))
            weights = [torch.empty(size, dtype=torch.bfloat16).normal_(std=0.02) for size in sizes]
            config.gate_proj, config.up_proj, config.down_proj = (weight.data_ptr() for weight in weights)
            config.physical_to_logical_map = ident.data_ptr()
            layer = getattr(kt.moe, _OWN[name])(config)
            try:
                task = layer.load_weights_task()
            except TypeError:
                task = layer.load_weights_task(ident.data_ptr())
            self._cpu.submit(task)
            self._cpu.sync()
            self._layers.append(layer)
            self._keep.append(ident)

    def measure(self, name: str, tokens: int) -> float:
        import torch

        if name != self._name:
            self._load(name)
        shape, num_inputs = self._shape, 16
        top_k = shape["top_k"]
        ids = torch.rand(num_inputs * tokens, shape["experts"]).argsort(-1)[:, :top_k]
        ids = ids.reshape(num_inputs, tokens * top_k).contiguous()
        weights = torch.rand(num_inputs, tokens, top_k)
        rows = torch.randn(tokens, shape["hidden"]).to(torch.bfloat16)
        out, batch = torch.empty_like(rows), torch.tensor([tokens], dtype=torch.int32)

        def once(i: int) -> None:
            layer, at = self._layers[i % len(self._layers)], i % num_inputs
            pointers = (ids[at].data_ptr(), weights[at].data_ptr(), rows.data_ptr(), out.data_ptr())
            self._cpu.submit(layer.forward_task(batch.data_ptr(), top_k, *pointers, False))
            self._cpu.sync()

        return mean_time(once, self._seconds, len(self._layers)) * 1e6


def _random(count: int, kind: int) -> Any:
    """Random blocks of a ggml type, their scales small numbers."""
    import torch

    if kind == 30:
        return (torch.randn(count) * 0.02).to(torch.bfloat16)
    elements, nbytes = _BLOCKS[kind]
    blocks = torch.randint(0, 256, (count // elements, nbytes), dtype=torch.uint8)
    blocks[:, 209 if kind == 14 else 1] = 0x04
    if kind == 12:
        blocks[:, 3] = 0x04
    return blocks.reshape(-1)


def main() -> None:
    """The child: answers questions until its input ends."""
    child = _Child(json.loads(sys.argv[1]))

    def answer(words: list[str]) -> float | None:
        return child.measure(words[0], int(words[1])) if words[0] in _GGML or words[0] in _OWN else None

    answer_questions(answer)


if __name__ == "__main__":
    main()
