"""Copies of a few matrices in one launch, with conversion, and a wait. Either side may be pinned memory of the CPU's.

One launch takes about as long as one copy of a copy engine, and small steps are made of many small copies. A launch
that copies to the CPU signals it by a word: a stream's own operation for that held the stream up for 7 us (H100).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ktransformers.kernels.triton.common.arrival import arrive_last
from ktransformers.kernels.triton.common.runtime import jit, tl

__all__ = ["MAX_MATRICES", "CopySignal", "convert_rows", "wait_for_word"]

MAX_MATRICES = 3
BLOCK = 1024


@jit
def _convert_one(source_ptr, target_ptr, source_row, target_row, row, columns, WIDTH: tl.constexpr):
    mask = columns < WIDTH
    values = tl.load(source_ptr + row * source_row + columns, mask=mask)
    tl.store(target_ptr + row * target_row + columns, values.to(target_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["address", "word"])
def _convert_rows_kernel(
    source0_ptr, target0_ptr, source1_ptr, target1_ptr, source2_ptr, target2_ptr,
    source0_row, target0_row, source1_row, target1_row, source2_row, target2_row, counter, address, word,
    WIDTH0: tl.constexpr, WIDTH1: tl.constexpr, WIDTH2: tl.constexpr, BLOCK: tl.constexpr, SIGNALS: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of the widest): BLOCK columns of one row of each matrix; a matrix of width 0 is not there.
    SIGNALS: the last program writes `word`, once all others have written their part."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _convert_one(source0_ptr, target0_ptr, source0_row, target0_row, row, columns, WIDTH0)
    if WIDTH1 > 0:
        _convert_one(source1_ptr, target1_ptr, source1_row, target1_row, row, columns, WIDTH1)
    if WIDTH2 > 0:
        _convert_one(source2_ptr, target2_ptr, source2_row, target2_row, row, columns, WIDTH2)
    if SIGNALS:  # noqa: SIM102 - Triton would compile both sides of an `and`
        if arrive_last(counter, tl.num_programs(0) * tl.num_programs(1)):
            # One thread writes it, once: the CPU may have answered before a second one did.
            at = address.to(tl.int64).to(tl.pointer_type(tl.int32))  # a low address comes as 32 bits
            tl.atomic_xchg(at, word, sem="release", scope="sys")


@jit(do_not_specialize=["address", "value"])
def _wait_kernel(address, value):
    word = address.to(tl.pointer_type(tl.int32))
    while tl.load(word, volatile=True) != value:
        pass


def wait_for_word(address: int, value: int) -> None:
    """Let the stream wait until the int32 at `address`, in pinned memory as the device sees it, is `value`.

    What the CPU wrote before is then seen by kernels behind. A stream's own wait is looked at again only now and then:
    on an H200 it ended some 50 us late when it had lasted longer than a few.
    """
    _wait_kernel[(1,)](address, value, num_warps=1)


@dataclass(frozen=True, slots=True)
class CopySignal:
    """Signal to the CPU that a copy has arrived: the int32 at `address`, in pinned memory as the device sees it,
    becomes `word`. counter: int32 [1] on the device, 0 between launches, of one stream."""

    counter: Tensor
    address: int
    word: int


def convert_rows(targets: Sequence[Tensor], sources: Sequence[Tensor], signal: CopySignal | None = None) -> None:
    """Copy sources[i] [T, N_i] to targets[i] [T, N_i], in the target's type; 1 to 3 matrices of any numeric types.

    Rows may be any distance apart, their elements are contiguous. On the GPU, or in pinned memory. signal: given
    behind all that is copied; not without rows. Raises ValueError for shapes that do not fit.
    """
    count, rows = len(sources), int(sources[0].shape[0])
    if not 1 <= count <= MAX_MATRICES or len(targets) != count:
        raise ValueError(f"1 to {MAX_MATRICES} matrices can be copied at once, got {count} and {len(targets)}")
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        if source.dim() != 2 or source.shape[0] != rows or target.shape != source.shape:
            raise ValueError(
                f"matrix {index} must be [{rows}, any] on both sides, got {list(source.shape)} and {list(target.shape)}"
            )
        if source.shape[1] > 1 and (source.stride(1) != 1 or target.stride(1) != 1):
            raise ValueError(f"the rows of matrix {index} must be contiguous")
    widths = [int(source.shape[1]) for source in sources] + [0] * (MAX_MATRICES - count)
    pairs = [(sources[i], targets[i]) if i < count else (sources[0], targets[0]) for i in range(MAX_MATRICES)]
    if rows == 0 or max(widths) == 0:
        if signal is not None:
            raise ValueError("nothing is copied behind which a signal could be given")
        return
    given = (targets[0], 0, 0) if signal is None else (signal.counter, signal.address, signal.word)
    _convert_rows_kernel[(rows, -(-max(widths) // BLOCK))](
        *(tensor for pair in pairs for tensor in pair), *(tensor.stride(0) for pair in pairs for tensor in pair),
        *given, WIDTH0=widths[0], WIDTH1=widths[1], WIDTH2=widths[2], BLOCK=BLOCK, SIGNALS=signal is not None,
        num_warps=4,
    )  # fmt: skip
