"""Arguments of one call of attention, and of one choice of positions to attend to, as every implementation takes them.

    T rows (tokens) of queries, Hq heads of queries, Hkv of keys and values, Dk columns of a key, Dv of a value

`kernels.cpu`, `kernels.triton.attention` and the oracle `kernels.reference` compute the same from one record. What only
one of them knows (a pool of threads, a workspace, how products are rounded) is an argument of its function. Records
check nothing: each implementation checks what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

__all__ = ["AttentionCall", "KvScales", "RowPages", "TopkCall"]

KvScales: TypeAlias = tuple[Tensor | None, Tensor | None]
"""Of keys, fp32 [slots, Hkv, parts], and of values, [slots, Hkv, 1]; None where what is kept are no codes."""


@dataclass(frozen=True, slots=True)
class RowPages:
    """The part of a paged cache that each row of a step sees, and where it lies.

    block_table: int32 [num_seqs, max_pages]; position p of sequence s is in slot
    block_table[s, p // page_size] * page_size + p % page_size. seq_ids: int32 or int64 [T], the row's sequence.
    kv_lens: int32 or int64 [T]: row t sees positions 0 .. kv_lens[t] - 1, its own included.
    """

    block_table: Tensor
    page_size: int
    seq_ids: Tensor
    kv_lens: Tensor

    @property
    def room(self) -> int:
        """Number of positions that a row of the block table has room for."""
        return int(self.block_table.shape[1]) * self.page_size

    def of(self, rows: slice | Tensor) -> RowPages:
        """Return the pages of some rows, which `rows` selects from T."""
        return RowPages(self.block_table, self.page_size, self.seq_ids[rows], self.kv_lens[rows])


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Causal attention of T flattened rows over a paged cache, whose result is [T, Hq, Dv].

    q: [T, Hq, Dk]. k_cache: [slots, Hkv, Dk], v_cache: [slots, Hkv, Dv], any slot and head strides, the last dimension
    contiguous; v_cache may be a view of k_cache (MLA: Hkv = 1). Query head h reads KV head h // (Hq / Hkv).
    A row sees what `pages` says, with window > 0 only the last `window` positions of that, or, is_chunked, those from
    the last multiple of `window` up to its own; a row that sees nothing gives zeros. scale: of dot products.
    sinks: fp32 [Hq], a virtual logit per head (gpt_oss). softcap > 0: scores become softcap * tanh(score / softcap)
    (gemma2). scales: of caches of codes, int8 or e4m3: of keys [slots, Hkv, 1], or [slots, Hkv, 2] where their first Dv
    columns have the first one (MLA), of values [slots, Hkv, 1].
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    pages: RowPages
    scale: float
    window: int = 0
    is_chunked: bool = False
    sinks: Tensor | None = None
    softcap: float = 0.0
    scales: KvScales = (None, None)

    @property
    def num_rows(self) -> int:
        """Number T of rows."""
        return int(self.q.shape[0])

    @property
    def group(self) -> int:
        """Number of query heads that share a KV head."""
        return int(self.q.shape[1] // self.k_cache.shape[1])

    @property
    def dim_k(self) -> int:
        """Number of columns of a key."""
        return int(self.q.shape[2])

    @property
    def dim_v(self) -> int:
        """Number of columns of a value."""
        return int(self.v_cache.shape[2])

    @property
    def signed_window(self) -> int:
        """The window as kernels take it: below 0 for chunks."""
        return -self.window if self.is_chunked else self.window

    def of(self, rows: slice) -> AttentionCall:
        """Return the call of some rows alone."""
        return replace(self, q=self.q[rows], pages=self.pages.of(rows))


@dataclass(frozen=True, slots=True)
class TopkCall:
    """Choice of the cached positions that T rows attend to, by scores of H index heads of D columns.

    q: [T, H, D]. k_cache: [slots, D], any slot stride. A position's score is
    sum_h weights[t, h] * max(scale * q[t, h] . k, 0) with weights [T, H]; with None each head chooses for itself, by
    scale * q . k, and results are of T * H rows, the heads of a row side by side. Rows see what `pages` says.
    Chosen are the num_chosen blocks of `block` positions whose best position scores highest, the lower ones where
    scores are equal, and the last num_local blocks that a row sees in any case; no position that a row does not see.
    """

    q: Tensor
    weights: Tensor | None
    k_cache: Tensor
    pages: RowPages
    scale: float
    num_chosen: int
    block: int = 1
    num_local: int = 0

    @property
    def choices_per_row(self) -> int:
        """Number of choices that a row makes: 1, or one for each head."""
        return 1 if self.weights is not None else int(self.q.shape[1])

    def of(self, rows: slice) -> TopkCall:
        """Return the call of some rows alone."""
        weights = None if self.weights is None else self.weights[rows]
        return replace(self, q=self.q[rows], weights=weights, pages=self.pages.of(rows))
