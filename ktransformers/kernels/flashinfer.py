"""FlashInfer's attention over a paged cache (arXiv 2501.01005), where it is installed. The only module that imports it.

Steps of many rows only: FlashInfer decides on the CPU how it splits a step (`plan`), which a CUDA graph cannot replay.
Whether it can run something is asked first: `why_not`, `why_not_shape`, and `difference`, which computes. Knows
tensors; not models or phases.

T rows of S sequences, lengths and pages as in operators/context.py
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall, RowPages
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.paged import attention

__all__ = [
    "FlashInfer",
    "GqaShape",
    "LatentShape",
    "PageTable",
    "Shape",
    "difference",
    "pages_of",
    "tolerance",
    "version",
    "why_not",
    "why_not_shape",
    "workspace_nbytes",
]

_LEAST_CAPABILITY = (8, 0)  # bf16 tensor cores
_HEAD_DIMS = (64, 128, 256)
_LATENT_DIMS = (512, 64)
_DTYPES = (torch.float16, torch.bfloat16)

_SHARED_NBYTES = 128 << 20  # what FlashInfer's documentation recommends, shared by all shapes
_SHAPE_NBYTES = 8 << 20  # what a wrapper of FlashInfer allocates for itself

_MAX_PAGE = 16

_IMPORT_ERRORS = (ImportError, OSError, RuntimeError)  # of it, of its libraries, of parts whose versions differ


@dataclass(frozen=True, slots=True)
class GqaShape:
    """Shape of the grouped-query attention of some layers. window 0: all positions; softcap 0: none."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Shape of absorbed latent attention: queries [T, Hq, rank + rope_dim] on a cache of so many columns."""

    num_heads: int
    rank: int
    rope_dim: int
    dtype: torch.dtype
    scale: float


Shape = GqaShape | LatentShape


def _module() -> Any:
    return importlib.import_module("flashinfer")


def version() -> str | None:
    """Return FlashInfer's version, None where it cannot be imported."""
    try:
        return str(getattr(_module(), "__version__", "unknown"))
    except _IMPORT_ERRORS:
        return None


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def why_not(device: torch.device) -> str | None:
    """Return why FlashInfer cannot run on `device`, or None when nothing is known to speak against it."""
    try:
        _module()
    except _IMPORT_ERRORS as error:
        is_absent = isinstance(error, ModuleNotFoundError) and error.name == "flashinfer"
        return "it is not installed" if is_absent else f"it cannot be imported ({error})"
    capability = _capability(device)
    if capability is None:
        return f"{device} is no CUDA device"
    if capability < _LEAST_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, below 8.0"
    return None


def why_not_shape(shape: Shape) -> str | None:
    """Return why FlashInfer has no kernel for `shape`, or None when it has, by its documentation."""
    if shape.dtype not in _DTYPES:
        return f"its cache is {str(shape.dtype).removeprefix('torch.')}, not bf16 or fp16"
    if isinstance(shape, LatentShape):
        if (shape.rank, shape.rope_dim) != _LATENT_DIMS:
            return f"its latent has {shape.rank} + {shape.rope_dim} columns, not 512 + 64"
        return None
    if shape.head_dim not in _HEAD_DIMS:
        return f"its heads have {shape.head_dim} columns, not 64, 128 or 256"
    return None


def workspace_nbytes(num_shapes: int) -> int:
    """Return the bytes of a device that `FlashInfer` takes for so many shapes."""
    return _SHARED_NBYTES + num_shapes * _SHAPE_NBYTES if num_shapes else 0


@dataclass(frozen=True, slots=True)
class PageTable:
    """Where the keys of a step's sequences lie: compressed rows of page numbers, all int32 on the CPU.

    qo_indptr [S + 1]: first row of each sequence. kv_indptr [S + 1]: its first entry of indices. indices: pages of
    page_size positions. kv_lens [S]: positions of the sequence, its rows of the step being the last of them.
    """

    qo_indptr: Tensor
    kv_indptr: Tensor
    indices: Tensor
    kv_lens: Tensor
    page_size: int

    @property
    def last_page_lens(self) -> Tensor:
        """Number of positions in each sequence's last page, [S]."""
        return (self.kv_lens - 1) % self.page_size + 1


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(torch.int32)


def pages_of(seq_ids: Tensor, kv_lens: Tensor, block_table: Tensor, page_size: int) -> PageTable:
    """Return the pages of a step whose tensors are on the CPU; arguments as in `triton.attention`.

    Pages are cut into parts of at most 16 positions, since the static cache is one page of any size. Raises ValueError
    when the rows of a sequence do not follow one another.
    """
    counts = torch.bincount(seq_ids, minlength=block_table.shape[0])
    owners = counts.nonzero()[:, 0]
    counts = counts[owners]
    last = counts.cumsum(0) - 1
    is_next = seq_ids[1:] == seq_ids[:-1]
    if (seq_ids.diff() < 0).any() or (kv_lens.diff()[is_next] != 1).any():
        raise ValueError("rows of a sequence must lie side by side, in the order of their positions")
    part = math.gcd(page_size, _MAX_PAGE)
    lens = kv_lens[last].long()
    num_parts = (lens + part - 1) // part
    starts = _indptr(num_parts)
    nth = torch.arange(int(starts[-1])) - torch.repeat_interleave(starts[:-1].long(), num_parts)
    pages = block_table[torch.repeat_interleave(owners, num_parts), nth * part // page_size]
    indices = pages * (page_size // part) + nth * part % page_size // part
    return PageTable(_indptr(counts), starts, indices.to(torch.int32), lens.to(torch.int32), part)


class FlashInfer:
    """FlashInfer on one device. Every shape is planned before it runs, once a step; calls follow one another.

    Raises whatever FlashInfer raises: it compiles kernels when a shape is planned first.
    """

    def __init__(self, device: torch.device):
        self._module, self.device = _module(), device
        self._workspace = torch.empty(_SHARED_NBYTES, dtype=torch.uint8, device=device)
        self._wrappers: dict[Shape, Any] = {}
        self._page_sizes: dict[Shape, int] = {}

    def _wrapper(self, shape: Shape) -> Any:
        made = self._wrappers.get(shape)
        if made is None:
            if isinstance(shape, LatentShape):
                made = self._module.mla.BatchMLAPagedAttentionWrapper(self._workspace)
            else:
                made = self._module.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
            self._wrappers[shape] = made
        return made

    def plan(self, shape: Shape, pages: PageTable) -> None:
        """Prepare `run` for the layers of a shape in a step."""
        wrapper = self._wrapper(shape)
        self._page_sizes[shape] = pages.page_size
        if isinstance(shape, LatentShape):
            wrapper.plan(
                pages.qo_indptr, pages.kv_indptr, pages.indices, pages.kv_lens, shape.num_heads, shape.rank,
                shape.rope_dim, pages.page_size, causal=True, sm_scale=shape.scale, q_data_type=shape.dtype,
                kv_data_type=shape.dtype,
            )  # fmt: skip
            return
        wrapper.plan(
            pages.qo_indptr, pages.kv_indptr, pages.indices, pages.last_page_lens, shape.num_heads,
            shape.num_kv_heads, shape.head_dim, pages.page_size, causal=True, sm_scale=shape.scale,
            window_left=shape.window - 1,  # without itself; -1: all
            logits_soft_cap=shape.softcap or None, q_data_type=shape.dtype, kv_data_type=shape.dtype,
            disable_split_kv=True,  # a row's result does not depend on the others
        )  # fmt: skip

    def run(self, shape: Shape, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Compute attention of rows q [T, Hq, D] over the cache [slots, Hkv, D]; returns [T, Hq, Dv] (rank for
        latents).
        """
        size, wrapper = self._page_sizes[shape], self._wrappers[shape]
        if isinstance(shape, LatentShape):
            pages = keys.view(-1, size, keys.shape[-1])
            rank = shape.rank
            latent: Tensor = wrapper.run(q[..., :rank], q[..., rank:], pages[..., :rank], pages[..., rank:])
            return latent
        out: Tensor = wrapper.run(q, tuple(part.view(-1, size, *part.shape[1:]) for part in (keys, values)))
        return out


def _probe_step(window: int, page_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(seq_ids, kv_lens, block_table) of two sequences, one beyond the window, on scattered pages."""
    lengths, counts = (window + 75, 40), (38, 33)
    num_pages = [-(-length // page_size) for length in lengths]
    table = torch.zeros(2, max(num_pages), dtype=torch.int32)
    order = torch.randperm(sum(num_pages), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    table[0, : num_pages[0]], table[1, : num_pages[1]] = order[: num_pages[0]], order[num_pages[0] :]
    seq_ids = torch.repeat_interleave(torch.arange(2), torch.tensor(counts)).to(torch.int32)
    rows = [torch.arange(length - count + 1, length + 1) for length, count in zip(lengths, counts, strict=True)]
    return seq_ids, torch.cat(rows).to(torch.int32), table


def tolerance(shape: Shape) -> float:
    """Return by how much two right results may differ, for values up to 1.

    Weights and results are rounded to the type, each by half an epsilon, on both sides: 2 epsilon in all. FlashInfer
    may take tanh from an instruction that errs by 2^-11 (PTX, tanh.approx), times the cap in the logarithm of a weight.
    Sums are in fp32, of some hundred terms in another order: 2^-14.
    """
    softcap = shape.softcap if isinstance(shape, GqaShape) else 0.0
    return 2 * torch.finfo(shape.dtype).eps + 2 * softcap * 2**-11 + 2**-14


def difference(flash: FlashInfer, shape: Shape, cache_page: int = _MAX_PAGE) -> float:
    """Return the largest difference from the Triton kernels' result on random numbers, whose values are at most 1.

    cache_page: positions of a page of the cache that `shape` will be used on, for `pages_of` to cut alike.
    """
    window = shape.window if isinstance(shape, GqaShape) else 0
    page_size = 3 * math.gcd(cache_page, _MAX_PAGE)
    seq_ids, kv_lens, table = _probe_step(window, page_size)
    num_slots = (int(table.max()) + 1) * page_size
    generator = torch.Generator().manual_seed(2)

    def made(*size: int) -> Tensor:
        return (2 * torch.rand(size, generator=generator) - 1).to(flash.device, shape.dtype)

    flash.plan(shape, pages_of(seq_ids, kv_lens, table, page_size))
    table, seq_ids, kv_lens = (part.to(flash.device) for part in (table, seq_ids, kv_lens))
    pages = RowPages(table, page_size, seq_ids, kv_lens)
    if isinstance(shape, LatentShape):
        width, rank = shape.rank + shape.rope_dim, shape.rank
        q, keys = made(len(seq_ids), shape.num_heads, width), made(num_slots, 1, width)
        want = mla_attention(AttentionCall(q, keys, keys[..., :rank], pages, shape.scale))
        got = flash.run(shape, q, keys, keys[..., :rank])
    else:
        q = made(len(seq_ids), shape.num_heads, shape.head_dim)
        keys, values = (made(num_slots, shape.num_kv_heads, shape.head_dim) for _ in range(2))
        call = AttentionCall(q, keys, values, pages, shape.scale, shape.window, softcap=float(shape.softcap))
        want = attention(call)
        got = flash.run(shape, q, keys, values)
    if got.shape != want.shape:
        return math.inf
    return float((got.float() - want.float()).abs().max())
