"""Reads bytes of the CPU kernels' tiles of 16 rows: one number of each row, the rows side by side.

How large tiles are is the table's (kernels/formats.py); a block here has 32 columns, of types with blocks of 256 in the
file 256. Those of weights in groups: cpu_packed_groups.py. Triton's cache on disk knows the sources of kernels, not
the table: a size that changes needs a reader that changes, as it does where bytes move.
"""

from __future__ import annotations

from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.triton.common.runtime import jit, static, tl

__all__ = [
    "block_bytes",
    "byte_pairs",
    "floats",
    "halves",
    "head_bytes",
    "is_super",
    "line_words",
    "row_bytes_at",
    "tile_bytes",
]

# What is static is Python's: of plain numbers.
_SUPER = tuple(number for number, format in FORMATS.items() if format.is_packed and format.block == 256)
_SIZES = tuple(
    (
        number,
        format.head_cols,
        format.head_bytes,
        format.packed_bytes * (256 if number in _SUPER else 32) // format.block,
    )
    for number, format in FORMATS.items()
    if format.is_packed
)


@static
def is_super(type_number):
    """Whether a type's blocks have 256 columns."""
    return type_number in _SUPER


@static
def head_bytes(type_number, cols):
    """Return the bytes in front of a tile's blocks."""
    for number, head_cols, nbytes, _ in _SIZES:
        if number == type_number:
            return (-(-cols // head_cols) * nbytes + 63) // 64 * 64
    raise ValueError(f"type {type_number} is not packed")


@static
def block_bytes(type_number):
    """Return the bytes of a tile's block behind the head."""
    for number, _, _, nbytes in _SIZES:
        if number == type_number:
            return nbytes
    raise ValueError(f"type {type_number} is not packed")


@static
def tile_bytes(type_number, cols):
    """Return the bytes of a tile of 16 rows."""
    blocks = cols // (256 if type_number in _SUPER else 32)
    return head_bytes(type_number, cols) + blocks * block_bytes(type_number)


@jit
def halves(base, at, n, mask, SIZE: tl.constexpr):
    """Load an fp16 of each row from byte `at` of its tile on, fp32. SIZE: bytes of a tile of 16 rows."""
    pointer = base.to(tl.pointer_type(tl.float16)) + n // 16 * (SIZE // 2) + (at // 2 + n % 16)
    return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)


@jit
def floats(base, at, n, mask, SIZE: tl.constexpr):
    """Load an fp32 of each row from byte `at` of its tile on."""
    pointer = base.to(tl.pointer_type(tl.float32)) + n // 16 * (SIZE // 4) + (at // 4 + n % 16)
    return tl.load(pointer, mask=mask, other=0.0)


@jit
def byte_pairs(base, at, n, mask, SIZE: tl.constexpr):
    """Load two bytes of each row from byte `at` of its tile on, as an int32."""
    pointer = base.to(tl.pointer_type(tl.int16)) + n // 16 * (SIZE // 2) + (at // 2 + n % 16)
    return tl.load(pointer, mask=mask, other=0).to(tl.int32)


@jit
def line_words(base, at, n, mask, SIZE: tl.constexpr):
    """Load a word of each row from the line at byte `at` of its tile."""
    pointer = base.to(tl.pointer_type(tl.int32)) + n // 16 * (SIZE // 4) + (at // 4 + n % 16)
    return tl.load(pointer, mask=mask, other=0)


@jit
def row_bytes_at(base, at, n, mask, SIZE: tl.constexpr):
    """Load a byte of each row from byte `at` of its tile on, as an int32 in 0 .. 255."""
    return tl.load(base + n // 16 * SIZE + (at + n % 16), mask=mask, other=0).to(tl.int32)
