"""A module in FlashInfer's place: wrappers with its documented signatures, computed by kernels/reference.py.

Parameters and their order are those of FlashInfer 0.3 to 0.6, https://docs.flashinfer.ai/api/prefill.html and
.../api/mla.html. What is documented of arguments is asserted: shapes, types, that a plan comes before a run. Parameters
that change what is computed and that nobody uses here must have their defaults.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ktransformers.kernels import flashinfer, reference
from ktransformers.kernels.attention_call import AttentionCall, RowPages


@dataclass
class Calls:
    """What the wrappers were asked. plans: arguments by name. fault: added to each result."""

    plans: list[dict[str, Any]] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    fault: float = 0.0


def rows_of(qo_indptr: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor]:
    """seq_ids and the positions that each row sees, rows being the last positions of their sequences."""
    counts = qo_indptr.diff().tolist()
    assert qo_indptr[0] == 0
    seq_ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    seen = [range(length - n + 1, length + 1) for n, length in zip(counts, kv_lens.tolist(), strict=True)]
    return seq_ids, torch.tensor([position for part in seen for position in part])


def table_of(kv_indptr: Tensor, kv_indices: Tensor, kv_lens: Tensor, page_size: int) -> Tensor:
    """A block table [S, P] of the compressed one; each sequence must have just the pages it needs."""
    for part in (kv_indptr, kv_indices, kv_lens):
        assert part.dtype is torch.int32
        assert part.dim() == 1
    counts = kv_indptr.diff()
    assert counts.tolist() == [-(-length // page_size) for length in kv_lens.tolist()]
    table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
    for s, n in enumerate(counts.tolist()):
        table[s, :n] = kv_indices[int(kv_indptr[s]) : int(kv_indptr[s]) + n]
    return table


class BatchPrefillWithPagedKVCacheWrapper:
    calls: Calls

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ):
        assert float_workspace_buffer.numel() == 128 << 20
        assert kv_layout == "NHD"
        assert not use_cuda_graph
        self.planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        assert causal
        assert pos_encoding_mode == "NONE"
        assert not use_fp16_qk_reduction
        assert custom_mask is None
        assert packed_custom_mask is None
        assert head_dim_qk in (64, 128, 256)
        assert head_dim_vo in (None, head_dim_qk)
        assert int(paged_kv_last_page_len.min()) >= 1
        assert int(paged_kv_last_page_len.max()) <= page_size
        kv_lens = (paged_kv_indptr.diff() - 1) * page_size + paged_kv_last_page_len
        table = table_of(paged_kv_indptr, paged_kv_indices, kv_lens.to(torch.int32), page_size)
        self.planned = {
            "rows": rows_of(qo_indptr, kv_lens), "table": table, "page_size": page_size, "window_left": window_left,
            "shape": (num_qo_heads, num_kv_heads, head_dim_qk), "soft_cap": logits_soft_cap or 0.0,
            "scale": head_dim_qk**-0.5 if sm_scale is None else sm_scale, "dtype": q_data_type,
        }  # fmt: skip
        assert kv_data_type in (None, q_data_type)
        self.calls.plans.append(self.planned)

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *args: Any, out: Tensor | None = None) -> Tensor:
        assert not args
        plan = self.planned
        heads, kv_heads, dim = plan["shape"]
        seq_ids, seen = plan["rows"]
        assert q.shape == (len(seq_ids), heads, dim)
        for cache in paged_kv_cache:
            assert cache.shape[1:] == (plan["page_size"], kv_heads, dim)
            assert cache.dtype is q.dtype is plan["dtype"]
        keys, values = (cache.reshape(-1, kv_heads, dim).cpu() for cache in paged_kv_cache)
        pages = RowPages(plan["table"], plan["page_size"], seq_ids, seen)
        options = {"window": plan["window_left"] + 1, "softcap": plan["soft_cap"]}
        result = reference.attention(AttentionCall(q.cpu(), keys, values, pages, plan["scale"], **options))
        self.calls.runs.append("gqa")
        return (result + self.calls.fault).to(q)


class BatchMLAPagedAttentionWrapper:
    calls: Calls

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ):
        assert float_workspace_buffer.numel() == 128 << 20
        assert not use_cuda_graph
        self.planned: dict[str, Any] = {}

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        use_profiler: bool = False,
    ) -> None:
        assert causal
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert q_data_type is kv_data_type
        table = table_of(kv_indptr, kv_indices, kv_len_arr, page_size)
        self.planned = {
            "rows": rows_of(qo_indptr, kv_len_arr), "table": table, "page_size": page_size, "heads": num_heads,
            "scale": sm_scale, "dtype": q_data_type,
        }  # fmt: skip
        self.calls.plans.append(self.planned)

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor | None = None
    ) -> Tensor:
        plan = self.planned
        seq_ids, seen = plan["rows"]
        assert q_nope.shape == (len(seq_ids), plan["heads"], 512)
        assert q_pe.shape == (len(seq_ids), plan["heads"], 64)
        assert ckv_cache.shape[1:] == (plan["page_size"], 512)
        assert kpe_cache.shape[1:] == (plan["page_size"], 64)
        assert {t.dtype for t in (q_nope, q_pe, ckv_cache, kpe_cache)} == {plan["dtype"]}
        query, cache = torch.cat((q_nope, q_pe), dim=-1), torch.cat((ckv_cache, kpe_cache), dim=-1)
        keys = cache.reshape(-1, 1, 576).cpu()
        pages = RowPages(plan["table"], plan["page_size"], seq_ids, seen)
        result = reference.attention(AttentionCall(query.cpu(), keys, keys[..., :512], pages, plan["scale"]))
        self.calls.runs.append("mla")
        return (result + self.calls.fault).to(q_nope)


def install(monkeypatch: Any, capability: tuple[int, int] = (9, 0)) -> Calls:
    """Make `import flashinfer` give the fake, on devices of that capability; returns what will be asked of it.

    It takes fp32 as well, so that a made-up GPU of that type shows more than rounding would let through.
    """
    calls = Calls()
    prefill: Any = type("BatchPrefillWithPagedKVCacheWrapper", (BatchPrefillWithPagedKVCacheWrapper,), {"calls": calls})
    latent: Any = type("BatchMLAPagedAttentionWrapper", (BatchMLAPagedAttentionWrapper,), {"calls": calls})
    module = types.ModuleType("flashinfer")
    module.__dict__.update(
        __version__="0.0-fake",
        BatchPrefillWithPagedKVCacheWrapper=prefill,
        mla=types.SimpleNamespace(BatchMLAPagedAttentionWrapper=latent),
    )
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "_capability", lambda device: capability)
    monkeypatch.setattr(flashinfer, "_DTYPES", (torch.float16, torch.bfloat16, torch.float32))
    return calls


def remove(monkeypatch: Any) -> None:
    """Make `import flashinfer` fail as where it is not installed."""
    monkeypatch.setitem(sys.modules, "flashinfer", None)
