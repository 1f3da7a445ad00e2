"""Quantizes tensors on several threads and writes them where they belong. Knows no model.

Rows are quantized on their own, so how they are cut into pieces and which thread takes which does not show in the file.
At most two pieces a thread are in memory, beside what a source reads at once (of safetensors one tensor).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ktransformers.convert.header import Placed
from ktransformers.convert.partial_file import PartialFile
from ktransformers.convert.tensors import Matrix, OutTensor, rows_as, rows_f32
from ktransformers.errors import WeightError
from ktransformers.kernels.types import row_bytes
from ktransformers.weights.quantize.write import quantize

__all__ = ["Importance", "write_tensors"]

_PIECE_WEIGHTS = 1 << 22
_BLOCK_ROWS = 128  # of FP8 with one scale for so many

Importance = Mapping[str, npt.NDArray[np.float32]]
"""By tensor fp32 [matrices, cols], or [1, cols] for all of them: what an error in each column weighs."""


@dataclass(slots=True)
class _Pieces:
    """How many pieces of a tensor are not written yet."""

    placed: Placed
    left: int


class _Writer:
    """One run. Workers take pieces; the first error stops them all."""

    def __init__(
        self, file: PartialFile, importance: Importance, num_threads: int, advance: Callable[[int], None]
    ) -> None:
        self.file, self.importance, self.advance = file, importance, advance
        self.slots = threading.BoundedSemaphore(2 * num_threads)
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def piece(self, tensor: OutTensor, pieces: _Pieces, matrix: Matrix, index: int, rows: tuple[int, int]) -> None:
        """Quantize and write some rows of one matrix."""
        placed, (start, stop) = pieces.placed, rows
        if self.error is not None:
            return
        data = rows_as(matrix, start, stop, placed.qtype)
        if data is None:
            weights = self.importance.get(tensor.name)
            columns = None if weights is None else weights[index if len(weights) > 1 else 0]
            try:
                data = quantize(rows_f32(matrix, start, stop, tensor.name), placed.qtype, columns)
            except WeightError as error:
                raise WeightError(f"{tensor.name}: {error}") from error
        size = row_bytes(placed.qtype, placed.shape[-1])
        self.file.write(placed, (index * tensor.rows + start) * size, np.ascontiguousarray(data).data)
        with self.lock:
            pieces.left -= 1
            is_last = pieces.left == 0
            self.advance(data.nbytes)
        if is_last:
            self.file.finished(placed)

    def ended(self, future: Future[None]) -> None:
        """A piece is over, well or not."""
        error = future.exception()
        if error is not None:
            self.error = self.error or error
        self.slots.release()


def write_tensors(
    file: PartialFile,
    tensors: Sequence[OutTensor],
    importance: Importance,
    num_threads: int,
    advance: Callable[[int], None],
) -> None:
    """Write those tensors that `file` does not have yet. advance: called with the bytes written.

    Raises what reading and quantizing raise, and CapacityError when the disk is full.
    """
    writer = _Writer(file, importance, num_threads, advance)
    with ThreadPoolExecutor(num_threads, thread_name_prefix="quantize") as pool:
        try:
            for tensor, placed in zip(tensors, file.layout.tensors, strict=True):
                if placed.name in file.done:
                    continue
                work = list(_cut(tensor))
                pieces = _Pieces(placed, len(work))
                matrices = tensor.matrices()
                for index, start, stop in work:
                    writer.slots.acquire()
                    if writer.error is not None:
                        raise writer.error
                    future = pool.submit(writer.piece, tensor, pieces, matrices[index], index, (start, stop))
                    future.add_done_callback(writer.ended)
        except BaseException as error:
            writer.error = writer.error or error
            raise
    if writer.error is not None:
        raise writer.error


def _cut(tensor: OutTensor) -> Iterator[tuple[int, int, int]]:
    """(matrix, first row, row behind the last) of its pieces."""
    step = max(1, _PIECE_WEIGHTS // max(tensor.shape[-1], 1))
    step = -(-step // _BLOCK_ROWS) * _BLOCK_ROWS
    for index in range(tensor.num_matrices):
        for start in range(0, tensor.rows, step):
            yield index, start, min(start + step, tensor.rows)
