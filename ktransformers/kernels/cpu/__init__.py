"""Kernels of the CPU: checks, then one call into the native extension.

Knows tensors, worker pools and instruction-set tiers; does not know models, files, caches' owners or other devices.
Every result is bit-identical over tiers, thread counts, the number of rows in a call and the way rows are split (the
exact arithmetic is written above the code in `csrc/kernels/*.inl`), but for products in bf16, see `linear`.

Tensors are fp32 on the CPU and contiguous unless said otherwise. A wrong argument raises TypeError (dtype, class),
ValueError (shape, stride, device, range) or IndexError (an id out of range) that names it.
"""

from ktransformers.kernels.cpu.base import (
    NATIVE_TYPES,
    REBUILD,
    Isa,
    WorkerPool,
    active_isa,
    available_isas,
    has_bf16,
    lacking_isa,
)
from ktransformers.kernels.cpu.expert_store import ExpertStore
from ktransformers.kernels.cpu.grids import grid_values
from ktransformers.kernels.cpu.kv import write_kv
from ktransformers.kernels.cpu.moe import MoeKernel
from ktransformers.kernels.cpu.packing import (
    PACKED_TYPES,
    can_pack,
    copy_parts,
    empty_bytes,
    let_go,
    pack,
    pack_all,
    pack_fp8,
    pack_times,
    packed_nbytes,
    page_out,
    unmapped,
)
from ktransformers.kernels.cpu.paged_attention import MAX_BF16_DIMS, attention
from ktransformers.kernels.cpu.products import batched_linear, linear
from ktransformers.kernels.cpu.row_store import ROW_CACHE_NBYTES, RowStore
from ktransformers.kernels.cpu.rows import activate, dequantize_rows, gather_rows, rms_norm
from ktransformers.kernels.cpu.streams import (
    MAX_STREAMS,
    collapse_streams,
    gate_streams,
    mix_streams,
    norm_streams,
    split_columns,
)
from ktransformers.kernels.cpu.topk_positions import MAX_INDEX_HEADS, select_topk_positions

__all__ = [
    "MAX_BF16_DIMS",
    "MAX_INDEX_HEADS",
    "MAX_STREAMS",
    "NATIVE_TYPES",
    "PACKED_TYPES",
    "REBUILD",
    "ROW_CACHE_NBYTES",
    "ExpertStore",
    "Isa",
    "MoeKernel",
    "RowStore",
    "WorkerPool",
    "activate",
    "active_isa",
    "attention",
    "available_isas",
    "batched_linear",
    "can_pack",
    "collapse_streams",
    "copy_parts",
    "dequantize_rows",
    "empty_bytes",
    "gate_streams",
    "gather_rows",
    "grid_values",
    "has_bf16",
    "lacking_isa",
    "let_go",
    "linear",
    "mix_streams",
    "norm_streams",
    "pack",
    "pack_all",
    "pack_fp8",
    "pack_times",
    "packed_nbytes",
    "page_out",
    "rms_norm",
    "select_topk_positions",
    "split_columns",
    "unmapped",
    "write_kv",
]
