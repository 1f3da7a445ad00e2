"""Keys and values in 8 bits, with a scale for each position and head: how kernels write and read them. Knows tensors.

A code times its scale is the value; `kernels.reference.quantize_kv` states the arithmetic. Codes are int8, or FP8
(e4m3), of which kernels are given the bits, in uint8: GPUs before compute capability 8.9 do not know the type. Of a
latent key the latent and the rotated part have a scale each. Codes are widened in registers to the type of the
products, which holds all of them exactly; int8 or FP8 attention, which rounds queries too, has to be asked for.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ktransformers.kernels.triton.common.bits import e4m3
from ktransformers.kernels.triton.common.elementwise import check_float
from ktransformers.kernels.triton.common.runtime import jit, power_of_two, tl

__all__ = [
    "bits_of",
    "check_cache",
    "codes_of",
    "factor_and_scale",
    "has_codes",
    "magnitude",
    "put_codes",
    "put_heads",
    "why_no_quantized_attention",
    "widen_latents",
    "widened",
]

_CODES = (torch.int8, torch.float8_e4m3fn)
_E4M3_CAPABILITY = (8, 9)
_ROWS_PER_PROGRAM = 8


def has_codes(cache: Tensor) -> bool:
    """Whether a cache keeps codes of 8 bits."""
    return cache.dtype in _CODES


def why_no_quantized_attention(dtype: torch.dtype, device: torch.device, widths: tuple[int, int]) -> str | None:
    """Return why keys kept in `dtype` are not multiplied as codes on a device; None where they are.

    widths: columns of keys and values. Others are read in two parts, of which products have not been right everywhere.
    """
    if dtype not in _CODES:
        return f"keys are kept in {str(dtype).removeprefix('torch.')}, not in codes"
    if any(width & (width - 1) for width in widths):
        return f"heads of {widths[0]} and {widths[1]} columns, which are no powers of two"
    if dtype == torch.float8_e4m3fn and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < _E4M3_CAPABILITY:
            return f"products of e4m3 want compute capability 8.9, and this GPU has {capability[0]}.{capability[1]}"
    return None


def bits_of(cache: Tensor) -> Tensor:
    """Return a cache as kernels take it."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


def check_cache(name: str, cache: Tensor, scales: Tensor | None, shape: tuple[int | None, ...], parts: int = 1) -> None:
    """Raise TypeError or ValueError unless `cache` is [slots, heads, columns] of floats, or of codes with scales that
    fit: fp32 [slots, heads, parts].
    """
    if not has_codes(cache):
        check_float(name, cache, shape)
        if scales is not None:
            raise ValueError(f"scales of {name} go with codes of 8 bits, not with {cache.dtype}")
        return
    is_fit = cache.dim() == len(shape) and all(w is None or w == n for n, w in zip(cache.shape, shape, strict=True))
    if not is_fit or (cache.shape[-1] > 1 and cache.stride(-1) != 1):
        raise ValueError(f"{name} must have shape {list(shape)}, heads contiguous, got {list(cache.shape)}")
    if scales is None or scales.dtype != torch.float32 or scales.device != cache.device:
        raise TypeError(f"scales of {name} must be torch.float32 on {cache.device} for a cache of {cache.dtype}")
    if tuple(scales.shape) != (*cache.shape[:2], parts) or (parts > 1 and scales.stride(2) != 1):
        raise ValueError(f"scales of {name} must have shape {[*cache.shape[:2], parts]}, got {list(scales.shape)}")


@jit
def magnitude(x):
    """Return the bits of |x|: whole numbers in the order of the magnitudes, infinity and NaN above all others."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def factor_and_scale(top, pointers):
    """Return the factor that makes a head codes, and its scale. top: its largest `magnitude`; pointers: to codes.

    A head below 2^-100 has the factor 0, and one with infinities or NaN also the scale NaN.
    """
    if pointers.dtype.element_ty == tl.int8:  # noqa: SIM108 (decided while compiling)
        most = 127.0
    else:
        most = 448.0
    is_finite = top < 0x7F800000
    is_used = (top >= 0x0D800000) & is_finite
    largest = tl.where(is_used, top, 0x3F800000).to(tl.float32, bitcast=True)
    most = largest * 0.0 + most
    factor = tl.where(is_used, tl.div_rn(most, largest), 0.0)
    scale = tl.where(is_used, tl.div_rn(largest, most), tl.where(is_finite, 0.0, float("nan")))
    return factor, scale


@jit
def codes_of(x, factor, pointers):
    """Multiply x with its factor, which has x's shape or broadcasts to it, and round to the nearest code, ties to even.

    pointers: to codes of the type. Bits are rounded, since there is no call for it that the interpreter and all GPUs
    know. Adding 2^23 leaves no bits below 1 in an fp32, and adding 2^14 none below 2^-9, the least FP8 number.
    """
    scaled = tl.where(factor > 0.0, x, 0.0) * factor
    bits = scaled.to(tl.int32, bitcast=True)
    top = bits & 0x7FFFFFFF
    size = top.to(tl.float32, bitcast=True)
    if pointers.dtype.element_ty == tl.int8:
        number = (size + 8388608.0).to(tl.int32, bitcast=True) - 0x4B000000
        codes = tl.where(bits < 0, -number, number).to(tl.int8)
    else:
        rounded = ((top + 0x7FFFF + ((top >> 20) & 1)) >> 20) - 960  # exponents count from 7, not 127
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        codes = (tl.where(top < 0x3C800000, small, rounded) | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@jit
def put_codes(pointers, x, factor, mask):
    """Store `codes_of` x."""
    tl.store(pointers, codes_of(x, factor, pointers), mask=mask)


@jit
def put_heads(pointers, x, mask, scale_pointers, keep, HAS_CODES: tl.constexpr):
    """Store whole heads x [heads, columns], fp32 and 0 where there are no columns, as the cache keeps them.

    keep: heads whose scales are stored. mask: of x.
    """
    if HAS_CODES:
        factor, scale = factor_and_scale(tl.max(magnitude(x), 1), pointers)
        put_codes(pointers, x, factor[:, None], mask)
        tl.store(scale_pointers, scale, mask=keep)
    else:
        tl.store(pointers, x.to(pointers.dtype.element_ty), mask=mask)


@jit
def widened(tile, COMPUTE: tl.constexpr):
    """Convert a tile of a cache to the type of the products; codes as they are, without their scales.

    What a GPU has between e4m3 and bf16 without fp32 takes the unit of exponentials.
    """
    if tile.dtype == tl.uint8:
        return e4m3(tile.to(tl.int32), 0).to(COMPUTE)
    if tile.dtype == tl.float8e4nv:
        return tile.to(tl.float32).to(COMPUTE)
    return tile.to(COMPUTE)


@jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["slot_ptr"])
def _widen_kernel(
    cache_ptr, scale_ptr, slot_ptr, out_ptr, cache_slot, scale_slot, out_row, num_rows,
    RANK: tl.constexpr, RANK_P2: tl.constexpr, ROPE: tl.constexpr, ROPE_P2: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (cdiv(num_rows, ROWS),): the latents of ROWS slots."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    keep = rows < num_rows
    slots = tl.load(slot_ptr + rows, mask=keep, other=0).to(tl.int64)
    source, out = cache_ptr + slots[:, None] * cache_slot, out_ptr + rows[:, None] * out_row
    scales = scale_ptr + slots * scale_slot
    columns = tl.arange(0, RANK_P2)[None, :]
    mask = keep[:, None] & (columns < RANK)
    x = widened(tl.load(source + columns, mask=mask, other=0.0), tl.float32)
    x *= tl.load(scales, mask=keep, other=0.0)[:, None]
    tl.store(out + columns, x.to(out_ptr.dtype.element_ty), mask=mask)
    rest = RANK + tl.arange(0, ROPE_P2)[None, :]
    mask = keep[:, None] & (rest < RANK + ROPE)
    x = widened(tl.load(source + rest, mask=mask, other=0.0), tl.float32)
    x *= tl.load(scales + 1, mask=keep, other=0.0)[:, None]
    tl.store(out + rest, x.to(out_ptr.dtype.element_ty), mask=mask)


def widen_latents(cache: Tensor, scales: Tensor | None, rank: int, slots: Tensor, out: Tensor) -> None:
    """Write the latent keys of some slots as rows of numbers.

    cache: codes [slots, 1, R + P], scales fp32 [slots, 1, 2]. rank: R. slots: int32 or int64 [L]. out: [L, R + P],
    fp16, bf16 or fp32. Raises TypeError or ValueError for what does not fit; slots are not checked.
    """
    num_rows, width = out.shape
    check_cache("cache", cache, scales, (None, 1, width), parts=2)
    check_float("out", out, (None, None))
    if scales is None or not 0 < rank < width:
        raise ValueError(f"latents of {width} columns want codes and a rank below that, got {cache.dtype} and {rank}")
    if slots.dtype not in (torch.int32, torch.int64) or tuple(slots.shape) != (num_rows,) or not slots.is_contiguous():
        raise ValueError(f"slots must be int32 or int64 [{num_rows}], got {slots.dtype} {list(slots.shape)}")
    if num_rows == 0:
        return
    codes = bits_of(cache)
    _widen_kernel[(-(-num_rows // _ROWS_PER_PROGRAM),)](
        codes, scales, slots, out, codes.stride(0), scales.stride(0), out.stride(0), num_rows,
        RANK=rank, RANK_P2=power_of_two(rank), ROPE=width - rank, ROPE_P2=power_of_two(width - rank),
        ROWS=_ROWS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
