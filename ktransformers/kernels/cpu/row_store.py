"""A table in files of which a step needs few rows, with those in memory that were looked up last (csrc/ops/store).

Knows rows, files and bytes; not what they mean.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ktransformers.errors import FormatError, WeightError
from ktransformers.kernels.cpu.base import WorkerPool, check_tensor, output
from ktransformers.kernels.cpu.expert_store import Extent
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import QuantType
from ktransformers.kernels.untraced import untraced

__all__ = ["ROW_CACHE_NBYTES", "RowStore"]

logger = logging.getLogger(__name__)

ROW_CACHE_NBYTES = 64 << 20
"""Bytes of rows that stay in memory, unless the table has fewer: those of some ten thousand tokens."""


class RowStore:
    """A table [N, cols] in block layout, whose rows are read as they are looked up, past the system's cache where
    the file system can.

    files, parts: where its rows lie, in their order, each part some whole rows; `path_index` counts files. They stay
    open: one that is deleted goes on serving; one that changes makes calls fail. pool: of an instruction set.
    cache_nbytes: of rows that stay in memory. Raises WeightError for a file that cannot be opened, FormatError for
    parts that are not in the files.
    """

    def __init__(
        self,
        files: Sequence[Path],
        parts: Sequence[Extent],
        qtype: QuantType,
        cols: int,
        pool: WorkerPool,
        cache_nbytes: int = ROW_CACHE_NBYTES,
    ) -> None:
        self._cols, self._pool = cols, pool
        places = [(part.path_index, part.offset, part.nbytes) for part in parts]
        try:
            self.handle = extension.RowStore(
                [str(path) for path in files], pool.handle, int(qtype), cols, places, cache_nbytes
            )
        except ValueError as error:
            raise FormatError(f"a table cannot be read from its files: {error}") from error
        except RuntimeError as error:
            raise WeightError(str(error)) from error
        self._finalizer = weakref.finalize(self, self.handle.close)
        for index in {part.path_index for part in parts}:
            if not self.handle.is_direct(index):
                logger.warning(
                    "%s: its file system has no O_DIRECT, so rows are read through the system's cache", files[index]
                )

    @untraced
    def gather(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Return rows `ids` as fp32, as `gather_rows` does of a mapped table.

        ids: int64 [T]. out: [T, cols], made when None. Raises IndexError for an id outside of the table, ReadError for
        rows that cannot be read now; the next call tries again.
        """
        check_tensor("ids", ids, (None,), torch.int64)
        result = output(out, (ids.shape[0], self._cols))
        self.handle.gather(self._pool.handle, ids.data_ptr(), ids.shape[0], result.data_ptr())
        return result

    def counts(self) -> tuple[int, int, int, float, int]:
        """Return counts so far: rows that were in memory when they were looked up, or asked for already; those that
        were read; bytes read, whole sectors; seconds waited; reads that failed. Any thread may ask, also after
        `close`.
        """
        hits, misses, nbytes, waited_ns, errors = self.handle.stats()
        return hits, misses, nbytes, waited_ns / 1e9, errors

    def close(self) -> None:
        """End the threads, close the files and give the memory back, once no call is under way. Later calls raise
        RuntimeError. Closing twice does nothing.
        """
        self._finalizer()
