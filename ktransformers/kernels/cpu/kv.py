"""Keys and values in a cache on the CPU: the types in which it keeps them, and writing rows to it."""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool
from ktransformers.kernels.extension import extension
from ktransformers.kernels.untraced import untraced

__all__ = ["check_cache", "check_scales", "kv_type", "write_kv"]

_NUMBERS = extension.kv_types()
_KV_TYPES = {
    torch.float32: _NUMBERS["F32"],
    torch.bfloat16: _NUMBERS["BF16"],
    torch.int8: _NUMBERS["I8"],
    torch.float8_e4m3fn: _NUMBERS["F8"],
}


def kv_type(name: str, cache: Tensor) -> int:
    """Return the number of a cache's type, as the extension takes it. Raises TypeError, with `name`, for
    another type.
    """
    if cache.dtype not in _KV_TYPES:
        known = ", ".join(str(dtype) for dtype in _KV_TYPES)
        raise TypeError(f"{name} must be one of {known}, got {cache.dtype}")
    return _KV_TYPES[cache.dtype]


def check_cache(name: str, cache: Tensor) -> None:
    """Raise TypeError or ValueError unless `cache` is [slots, heads, dim] on the CPU, a head contiguous."""
    kv_type(name, cache)
    if cache.device.type != "cpu" or cache.dim() != 3 or (cache.numel() and cache.stride(2) != 1):
        raise ValueError(
            f"{name} must be a CPU tensor [slots, kv heads, dim] whose last dimension is contiguous, "
            f"got shape {list(cache.shape)} with strides {cache.stride()}"
        )


def check_scales(name: str, scales: Tensor | None, cache: Tensor, most_parts: int) -> tuple[int, int, int, int]:
    """Check a cache's scales; return (address, strides of slots and heads, parts), (0, 0, 0, 1) where it has none.

    Raises TypeError or ValueError, with `name`, for scales that do not fit the cache.
    """
    if cache.dtype.itemsize > 1:
        if scales is not None:
            raise ValueError(f"{name} goes with codes of 8 bits, not with {cache.dtype}")
        return 0, 0, 0, 1
    slots, heads = cache.shape[:2]
    shapes = [[slots, heads, parts] for parts in range(1, most_parts + 1)]
    if scales is None or scales.dtype != torch.float32 or scales.device.type != "cpu":
        raise TypeError(f"{name} must be torch.float32 on the CPU for a cache of {cache.dtype}")
    if list(scales.shape) not in shapes or (scales.shape[2] > 1 and scales.stride(2) != 1):
        expected = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must have shape {expected}, got {list(scales.shape)} with strides {scales.stride()}")
    return scales.data_ptr(), scales.stride(0), scales.stride(1), scales.shape[2]


@untraced
def write_kv(
    rows: Tensor, slots: Tensor, cache: Tensor, scales: Tensor | None, pool: WorkerPool, split: int = 0
) -> None:
    """Write keys or values fp32 [T, H, D] to slots int64 [T] of cache [num_slots, H, D], in the cache's type.

    rows: any strides of rows and heads. scales: of codes, [num_slots, H, 1], or [num_slots, H, 2] where the first
    `split` dimensions have a scale of their own (latent keys). What is kept of a row depends on that row alone.
    Raises IndexError for a slot outside of the cache.
    """
    check_cache("cache", cache)
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or (rows.numel() and rows.stride(-1) != 1):
        raise TypeError(f"rows must be torch.float32 on the CPU, numbers of a head side by side, got {rows.dtype}")
    if rows.dim() != 3 or rows.shape[1:] != cache.shape[1:]:
        raise ValueError(f"rows must have shape [T, {cache.shape[1]}, {cache.shape[2]}], got {list(rows.shape)}")
    if slots.dtype != torch.int64 or slots.shape != rows.shape[:1] or not slots.is_contiguous():
        raise ValueError(f"slots must be torch.int64 [{rows.shape[0]}], got {slots.dtype} {list(slots.shape)}")
    address, slot_stride, head_stride, parts = check_scales("scales", scales, cache, 2)
    if parts == 2 and not 0 < split < cache.shape[2]:
        raise ValueError(f"two scales want a split between 0 and {cache.shape[2]}, got {split}")
    extension.write_kv(
        pool.handle,
        kv_type("cache", cache),
        rows.data_ptr(),
        slots.data_ptr(),
        cache.data_ptr(),
        address,
        (rows.shape[0], rows.shape[1], rows.shape[2], cache.shape[0], split if parts == 2 else 0),
        (rows.stride(0), rows.stride(1), cache.stride(0), cache.stride(1), slot_stride, head_stride),
    )
