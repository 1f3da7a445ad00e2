"""Checks, tile sizes and launches that grouped-query and latent attention share. Reads no tensor's values.

Every launch parameter follows from shapes, types and the number of multiprocessors, so a launch can be captured in a
CUDA graph and replayed with other lengths, pages and rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.triton.attention.kernels import decode_kernel, prefill_kernel, reduce_kernel
from ktransformers.kernels.triton.attention.kv_codes import (
    bits_of,
    check_cache,
    has_codes,
    why_no_quantized_attention,
)
from ktransformers.kernels.triton.common.runtime import (
    is_interpreted,
    num_multiprocessors,
    power_of_two,
    shared_bytes,
    tl,
)

__all__ = [
    "DECODE_ROWS",
    "AttentionLaunch",
    "Tile",
    "check_call",
    "compute_type",
    "decode_tile",
    "launch_decode",
    "launch_prefill",
    "prefill_tile",
    "run",
    "workspace_numel",
]

DECODE_ROWS = 16
"""Up to so many rows (or one per sequence of the table, if that is more) are attended to by the split-KV kernel."""

MIN_CHUNK = 128
"""Fewest positions of a split: less work does not pay for a program of its own."""

MAX_SPLITS = 32

MAX_SHARES = 4
"""Programs that share a tile of rows of several sequences."""

MAX_FOLDED = 2048
"""Values (heads times width) of a split up to which the last program adds all splits; more of them take a launch."""

MAX_HEADS = 64
"""Query heads of one tile at most."""

WORKSPACE_NUMEL = 1 << 24

_LEAST_N = 16  # positions of a tile
_LEAST_CODES = 32  # columns that products of codes take at once
_SPARE_BYTES = 8 << 10  # of shared memory: what else kernels keep there

_LOG2E = math.log2(math.e)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """A call of attention with what the kernels of a GPU are given beside it.

    out: [T, Hq, Dv], any strides of rows and heads. is_shared: values are the first columns of the keys. counters:
    int32, all 0 between calls; with them a decode step's splits are weighed in the launch that computes them.
    quantized_attention: prefill rounds queries to codes too, and multiplies codes with codes.
    """

    call: AttentionCall
    out: Tensor
    is_shared: bool = False
    counters: Tensor | None = None
    quantized_attention: bool = False

    @property
    def has_codes(self) -> bool:
        return has_codes(self.call.k_cache)

    @property
    def element_bytes(self) -> int:
        """Bytes of a number that is multiplied: codes are widened to the queries' type."""
        return self.call.q.element_size() if self.has_codes else self.call.k_cache.element_size()

    @property
    def position_bytes(self) -> int:
        """Bytes of one position that a tile holds, once widened."""
        return (self.call.dim_k + (0 if self.is_shared else self.call.dim_v)) * self.element_bytes

    def of(self, rows: slice) -> AttentionLaunch:
        """Return the launch of some rows alone."""
        return replace(self, call=self.call.of(rows), out=self.out[rows])


def check_call(launch: AttentionLaunch) -> None:
    """Raise TypeError (dtype) or ValueError (shape, stride, device, range) that names the wrong argument."""
    _check_heads(launch)
    _check_numbers(launch)
    _check_quantized_attention(launch)
    call, pages = launch.call, launch.call.pages
    others = (
        call.k_cache,
        call.v_cache,
        launch.out,
        pages.block_table,
        pages.seq_ids,
        pages.kv_lens,
        call.sinks,
        launch.counters,
        *call.scales,
    )
    if any(tensor is not None and tensor.device != call.q.device for tensor in others):
        raise ValueError(f"all tensors must be on q's device, {call.q.device}")


def _check_heads(launch: AttentionLaunch) -> None:
    call = launch.call
    q, k, v = call.q, call.k_cache, call.v_cache
    for name, tensor in (("q", q), ("out", launch.out)) if launch.has_codes else _float_tensors(launch):
        if tensor.dtype not in _FLOATS:
            raise TypeError(f"{name} must be fp16, bf16 or fp32, got {tensor.dtype}")
        if tensor.dim() != 3 or (tensor.numel() and tensor.stride(2) != 1):
            raise ValueError(f"{name} must have 3 dimensions, the last contiguous, got {list(tensor.shape)}")
    if k.dtype != v.dtype:
        raise TypeError(f"k_cache is {k.dtype} and v_cache {v.dtype}: give one type")
    if launch.has_codes and q.dtype == torch.float16:
        raise TypeError(f"q of {q.dtype} has no room for values of {k.dtype}: give bf16 or fp32")
    parts = 2 if launch.is_shared else 1
    check_cache("k_cache", k, call.scales[0], (None, None, None), parts)
    if not launch.is_shared:
        check_cache("v_cache", v, call.scales[1], (None, None, None))
    if k.shape[:2] != v.shape[:2] or k.shape[2] != q.shape[2]:
        raise ValueError(f"k_cache {list(k.shape)} must fit q {list(q.shape)} and v_cache {list(v.shape)}")
    if k.shape[1] < 1 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} KV heads")
    if launch.out.shape != (q.shape[0], q.shape[1], v.shape[2]):
        raise ValueError(f"out must have shape {[*q.shape[:2], v.shape[2]]}, got {list(launch.out.shape)}")


def _check_quantized_attention(launch: AttentionLaunch) -> None:
    if not launch.quantized_attention:
        return
    call = launch.call
    if not launch.has_codes or launch.is_shared:
        kept = "latent keys" if launch.is_shared else f"a cache of {call.k_cache.dtype}"
        raise ValueError(f"quantized_attention goes with codes of keys and values, not with {kept}")
    reason = why_no_quantized_attention(call.k_cache.dtype, call.q.device, (call.dim_k, call.dim_v))
    if reason is not None:
        raise TypeError(reason)
    if not call.scale > 0:
        raise ValueError(f"scale {call.scale} must be above 0 with quantized_attention")


def _float_tensors(launch: AttentionLaunch) -> tuple[tuple[str, Tensor], ...]:
    call = launch.call
    return ("q", call.q), ("k_cache", call.k_cache), ("v_cache", call.v_cache), ("out", launch.out)


def _check_numbers(launch: AttentionLaunch) -> None:
    call, pages = launch.call, launch.call.pages
    q, table = call.q, pages.block_table
    if table.dtype != torch.int32 or table.dim() != 2 or (table.numel() and table.stride(1) != 1):
        raise TypeError(f"block_table must be int32 [num_seqs, max_pages] with contiguous rows, got {table.dtype}")
    for name, numbers in (("seq_ids", pages.seq_ids), ("kv_lens", pages.kv_lens)):
        if numbers.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {numbers.dtype}")
        if numbers.shape != q.shape[:1] or not numbers.is_contiguous():
            raise ValueError(f"{name} must be contiguous with shape {[q.shape[0]]}, got {list(numbers.shape)}")
    if call.sinks is not None and (call.sinks.shape != q.shape[1:2] or not call.sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous with shape {[q.shape[1]]}, got {list(call.sinks.shape)}")
    if pages.page_size < 1 or call.window < 0 or call.softcap < 0:
        raise ValueError(
            f"page_size {pages.page_size} must be >= 1, window {call.window} and softcap {call.softcap} >= 0"
        )
    if launch.counters is not None and (launch.counters.dtype != torch.int32 or not launch.counters.is_contiguous()):
        raise TypeError(f"counters must be contiguous int32, got {launch.counters.dtype}")


def _parts(dim: int, least: int = 16, *, are_equal: bool = False) -> tuple[int, int]:
    """`dim` columns as a power of two and a power of two that holds the rest (0 for none); at least `least` each.

    are_equal: the second one, if there is one, is as large as the first.
    """
    main = max(least, 1 << (dim.bit_length() - 1))
    rest = dim - main
    if rest <= 0:
        return main, 0
    return main, main if are_equal else max(least, 1 << (rest - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a launch: block_m query rows (tokens times heads) against block_n positions per step.

    min_chunk: fewest positions of a split in decode.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_chunk: int = MIN_CHUNK


def split_count(num_heads: int, num_kv_heads: int, max_len: int, device: torch.device, min_chunk: int) -> int:
    """Return the number of programs that share one tile of heads of one row: enough for one row to fill the device, no
    more than have work.

    Does not look at the number of rows, so that a row's result does not depend on it.
    """
    fill = max(1, num_multiprocessors(device) // max(num_kv_heads, num_heads // MAX_HEADS))
    wanted = min(MAX_SPLITS, 1 << (fill.bit_length() - 1))
    return max(1, min(wanted, -(-max_len // min_chunk)))


def _row_numel(num_heads: int, dim_v: int, splits: int) -> int:
    """fp32 values of a row's partial results: per head and split a vector and the logarithm of its denominator."""
    return num_heads * splits * (dim_v + 1)


def workspace_numel(
    num_rows: int, num_heads: int, num_kv_heads: int, dim_v: int, max_len: int, device: torch.device
) -> int:
    """Return the fp32 values that decode works in: for all rows, or for as many as fit 64 MB, which then take turns."""
    row = _row_numel(num_heads, dim_v, split_count(num_heads, num_kv_heads, max_len, device, MIN_CHUNK))
    return row * min(num_rows, max(1, WORKSPACE_NUMEL // row))


def _constants(launch: AttentionLaunch, quantized_attention: bool = False) -> dict[str, Any]:
    call = launch.call
    dk0, dk1 = _parts(call.dim_k, _LEAST_CODES if quantized_attention else 16)
    # Values from codes in a second part that is narrower than the first were wrong on an H200 with Triton 3.6 (parts of
    # 64 and 32, 64 and 16, 128 and 32 columns, tiles of 64 rows; 64 and 64 were not).
    dv0, dv1 = _parts(call.dim_v, are_equal=launch.has_codes)
    return {
        "GROUP": call.group, "DK": call.dim_k, "DK0": dk0, "DK1": dk1, "DV": call.dim_v, "DV0": dv0, "DV1": dv1,
        "SHARED": launch.is_shared, "PAGE": call.pages.page_size, "HAS_WINDOW": call.window > 0,
        "HAS_SOFTCAP": call.softcap > 0,
        "PRECISION": "tf32x3" if launch.element_bytes == 4 else "tf32",
        "COMPUTE": compute_type(call.q.dtype if launch.has_codes else call.k_cache.dtype),
        "CODES": launch.has_codes,
    }  # fmt: skip


def compute_type(dtype: torch.dtype) -> Any:
    """Return the type in which kernels multiply values of `dtype`: the interpreter cannot multiply bf16."""
    if dtype == torch.float16:
        return tl.float16
    return tl.bfloat16 if dtype == torch.bfloat16 and not is_interpreted() else tl.float32


def _strides(call: AttentionCall) -> tuple[int, ...]:
    q, k, v = call.q, call.k_cache, call.v_cache
    scales = [0 if of is None else of.stride(i) for of in call.scales for i in (0, 1)]
    caches = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
    return (q.stride(0), q.stride(1), *caches, *scales, call.pages.block_table.stride(0))


def _caches(call: AttentionCall, quantized_attention: bool = False) -> tuple[Tensor, ...]:
    """Keys and values, then their scales; without, any tensor takes their places and is not read.

    Products of codes are given e4m3 as that, and other kernels its bits.
    """
    caches = call.k_cache, call.v_cache
    if not quantized_attention:
        caches = bits_of(call.k_cache), bits_of(call.v_cache)
    return *caches, *(caches[0] if of is None else of for of in call.scales)


def _scales(call: AttentionCall) -> tuple[float, float]:
    """What the kernel multiplies a dot product with, and the factor behind tanh; logits in units of log 2."""
    if call.softcap > 0:
        return call.scale / call.softcap, call.softcap * _LOG2E
    return call.scale * _LOG2E, 0.0


def _is_wide(launch: AttentionLaunch) -> bool:
    """Whether fp32 keys of latent attention must be multiplied in the smallest tiles."""
    return launch.element_bytes * launch.call.dim_k > 1280


def _is_aligned(call: AttentionCall) -> bool:
    """Whether rows of the cache begin where asynchronous copies of 4 bytes or more can."""
    size = call.k_cache.element_size()
    strides = [size * stride for cache in (call.k_cache, call.v_cache) for stride in (cache.stride(0), cache.stride(1))]
    return all(s % 4 == 0 for s in strides) and call.k_cache.data_ptr() % 16 == call.v_cache.data_ptr() % 16 == 0


def _room(launch: AttentionLaunch, block_m: int) -> int:
    """Bytes of shared memory for keys and values beside block_m rows of queries."""
    most = min(shared_bytes(launch.call.q.device) - _SPARE_BYTES, 204800)
    return most - block_m * launch.call.dim_k * launch.element_bytes


def _rows(launch: AttentionLaunch, block_m: int) -> int:
    """block_m rows, or fewer where they leave no room for the fewest positions."""
    while block_m > 16 and 3 * _LEAST_N * launch.position_bytes > _room(launch, block_m):
        block_m //= 2
    return block_m


def _fit(launch: AttentionLaunch, block_m: int, num_warps: int) -> Tile:
    """As many positions per step as leave room: three tiles of keys and values (two under way, one in use) and the
    queries take at most 200 KB of shared memory, or what the device has.

    A page is looked up before its keys are read, so two stages of the pipeline make one tile under way. Keys that
    cannot be copied asynchronously are not read ahead at all: read ahead behind their pages, they were the one
    difference of a case that made an illegal access on an H200 with Triton 3.6 (20 heads on one KV head of 40 columns
    of fp16).
    """
    if not _is_aligned(launch.call):
        return Tile(block_m, 32, num_warps, 1)
    room = _room(launch, block_m)
    block_n = next((n for n in (64, 32) if 3 * n * launch.position_bytes <= room), _LEAST_N)
    return Tile(block_m, block_n, num_warps, 7 if block_n * launch.position_bytes <= 16384 else 5)


def _fit_widened(launch: AttentionLaunch, block_m: int, num_warps: int) -> Tile:
    """As `_fit`; of codes that are key and value at once fewer rows where keys leave room for the fewest positions.

    A program's sums take all registers but those that codes are widened in: with 64 rows of them they spill.
    """
    tile = _fit(launch, block_m, num_warps)
    if launch.has_codes and launch.is_shared and tile.block_m > 32 and tile.block_n == _LEAST_N:
        return _fit(launch, 32, num_warps)
    return tile


def decode_tile(launch: AttentionLaunch) -> Tile:
    """Return the tile of the split-KV kernel: the heads that share a KV head, up to 64. Codes are widened by more
    warps.

    Triton 3.9 keeps a tile of latents, which are keys and values both, in registers: sums of 32 rows take more warps,
    and where latents are widened leave room for the fewest positions only.
    """
    call = launch.call
    block_m = 16 if _is_wide(launch) else _rows(launch, min(MAX_HEADS, max(16, power_of_two(call.group))))
    is_widened = launch.has_codes and launch.is_shared
    most = 4096 if is_widened else 8192 if launch.is_shared else 16384
    tile = _fit_widened(launch, block_m, 8 if block_m * call.dim_v > most else 4)
    return replace(tile, block_n=_LEAST_N) if is_widened and tile.block_m == 32 else tile


def prefill_tile(launch: AttentionLaunch) -> Tile:
    """Return the prefill tile, 64 or 128 rows: what fits in half the registers, and 64 where there are few of them."""
    call = launch.call
    is_small = call.num_rows * call.group <= 1024 or call.dim_v > 256 or launch.element_bytes == 4
    block_m = 16 if _is_wide(launch) else _rows(launch, 64 if is_small else 128)
    return _fit_widened(launch, block_m, 8 if block_m * call.dim_v > 8192 else 4)


def _tile_constants(launch: AttentionLaunch, tile: Tile) -> dict[str, int]:
    call = launch.call
    heads = min(call.group, tile.block_m)
    return {
        "HEADS": heads, "HEAD_BLOCKS": -(-call.group // heads), "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps, "num_stages": tile.num_stages,
    }  # fmt: skip


def launch_decode(launch: AttentionLaunch, workspace: Tensor | None, tile: Tile | None = None) -> None:
    """Launch split-KV attention and its reduction, for as many rows at a time as the workspace holds.

    workspace: fp32, contiguous, for one row at least; made with `workspace_numel` values when None. tile:
    `decode_tile` when None.
    """
    call = launch.call
    tile = decode_tile(launch) if tile is None else tile
    num_rows, num_heads = call.q.shape[:2]
    num_kv_heads, device = call.k_cache.shape[1], call.q.device
    max_len = call.pages.room
    splits = split_count(num_heads, num_kv_heads, max_len, device, tile.min_chunk)
    row_numel = _row_numel(num_heads, call.dim_v, splits)
    if workspace is None:
        numel = workspace_numel(num_rows, num_heads, num_kv_heads, call.dim_v, max_len, device)
        workspace = torch.empty(max(numel, row_numel), dtype=torch.float32, device=device)
    if workspace.dtype != torch.float32 or not workspace.is_contiguous() or workspace.numel() < row_numel:
        raise ValueError(f"workspace must be contiguous fp32 of at least {row_numel} values, got {workspace.numel()}")
    step = workspace.numel() // row_numel
    for first in range(0, num_rows, step):
        part = launch if step >= num_rows else launch.of(slice(first, first + step))
        _launch_splits(part, tile, splits, workspace.view(-1))


def run(launch: AttentionLaunch, workspace: Tensor | None = None) -> Tensor:
    """Check a launch and compute it with the kernel for its number of rows; returns its `out`.

    Up to DECODE_ROWS rows, or as many as the table has, take the split-KV kernel, each row on its own; more take the
    prefill kernel. workspace: see `launch_decode`. Raises TypeError or ValueError as `check_call`.
    """
    check_call(launch)
    num_rows = launch.call.num_rows
    if num_rows and num_rows <= max(DECODE_ROWS, launch.call.pages.block_table.shape[0]):
        launch_decode(launch, workspace)
    elif num_rows:
        launch_prefill(launch)
    return launch.out


def _launch_splits(launch: AttentionLaunch, tile: Tile, splits: int, workspace: Tensor) -> None:
    call, pages = launch.call, launch.call.pages
    num_rows, num_heads = call.q.shape[:2]
    num_lse = num_rows * num_heads * splits
    parts, lse = workspace[: num_lse * call.dim_v], workspace[num_lse * call.dim_v :]
    constants = _tile_constants(launch, tile)
    tiles = call.k_cache.shape[1] * constants["HEAD_BLOCKS"]
    counters, out = launch.counters, launch.out
    is_folded = counters is not None and _is_foldable(launch, constants["HEADS"], num_rows * tiles)
    decode_kernel[(num_rows, tiles, splits)](
        call.q, *_caches(call), pages.block_table, pages.seq_ids, pages.kv_lens, parts, lse,
        out if call.sinks is None else call.sinks, out, counters if is_folded else pages.kv_lens,
        *_strides(call), out.stride(0), out.stride(1), *_scales(call), call.signed_window,
        NUM_HEADS=num_heads, MAX_SPLITS=splits, MIN_CHUNK=tile.min_chunk, FOLDED=is_folded,
        SPLITS_P2=power_of_two(splits), HAS_SINKS=call.sinks is not None, **constants, **_constants(launch),
    )  # fmt: skip
    if is_folded:
        return
    block_d = min(128, power_of_two(call.dim_v))
    reduce_kernel[(num_rows, num_heads, -(-call.dim_v // block_d))](
        parts, lse, pages.kv_lens, call.sinks, out, out.stride(0), out.stride(1), call.signed_window,
        NUM_HEADS=num_heads, DV=call.dim_v, BLOCK_D=block_d, BLOCK_N=tile.block_n, MAX_SPLITS=splits,
        SPLITS_P2=power_of_two(splits), MIN_CHUNK=tile.min_chunk, HAS_SINKS=call.sinks is not None,
        num_warps=4,
    )  # fmt: skip


def _is_foldable(launch: AttentionLaunch, heads: int, programs: int) -> bool:
    """Whether one program can weigh the splits of a row's tile of heads in less time than a launch takes."""
    counters = launch.counters
    return counters is not None and heads * launch.call.dim_v <= MAX_FOLDED and programs <= counters.numel()


def launch_prefill(launch: AttentionLaunch, tile: Tile | None = None) -> None:
    """Launch attention of tiles of rows. The rows of one sequence should lie side by side: each run of them is read
    apart.

    tile: `prefill_tile` when None.
    """
    call, pages = launch.call, launch.call.pages
    num_rows, num_kv_heads = call.q.shape[0], call.k_cache.shape[1]
    constants = _tile_constants(launch, prefill_tile(launch) if tile is None else tile)
    tokens = constants["BLOCK_M"] // constants["HEADS"]
    num_seqs = pages.block_table.shape[0]
    # One run is sure with one sequence or one row per tile. A tile rarely holds more runs than shares: they take turns.
    shares = 1 if num_seqs == 1 else min(tokens, num_seqs + 1, MAX_SHARES)
    out = launch.out
    prefill_kernel[(-(-num_rows // tokens), num_kv_heads * constants["HEAD_BLOCKS"], shares)](
        call.q, *_caches(call, launch.quantized_attention), pages.block_table, pages.seq_ids, pages.kv_lens, call.sinks,
        out,
        *_strides(call), out.stride(0), out.stride(1), *_scales(call), call.signed_window, num_rows,
        TOKENS=tokens, SHARES=shares, HAS_SINKS=call.sinks is not None, QUANTIZED_ATTENTION=launch.quantized_attention,
        **constants, **_constants(launch, launch.quantized_attention),
    )  # fmt: skip
