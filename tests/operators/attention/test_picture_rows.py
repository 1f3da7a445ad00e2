"""What rows of pictures see, and where they are turned to, beside plain formulas and transformers' own modules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeTextRotaryEmbedding
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeTextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from ktransformers.cache.paged import LayerShape, PagedCache
from ktransformers.core import Phase
from ktransformers.errors import UnsupportedError
from ktransformers.kernels import cpu
from ktransformers.kernels.attention_call import AttentionCall
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.attention.pictures import attend_pictures
from ktransformers.operators.attention.rope import KRotaryEmbedding
from ktransformers.operators.base import OperatorConfig
from ktransformers.operators.context import ForwardContext, PictureRows
from tests.support.models.tiny_models import tiny_config

HALF = {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MODULES = {
    "split": (Qwen2_5_VLRotaryEmbedding, "qwen2_5_vl_text", {"mrope_section": [4, 2, 2]}),
    "interleaved": (Qwen3VLTextRotaryEmbedding, "qwen3_vl_text", {"mrope_section": [3, 3, 2]}),
    "partial": (Glm4vMoeTextRotaryEmbedding, "glm4v_moe_text", HALF),
    "in turn": (Ernie4_5_VLMoeTextRotaryEmbedding, "ernie4_5_vl_moe_text", {"mrope_section": [3, 3, 2]}),
}
POSITIONS = torch.tensor([[0, 1, 2, 2, 2, 9, 4999], [0, 1, 2, 3, 4, 9, 700], [0, 1, 2, 2, 3, 9, 12]])[:, None]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool(1)
    yield made
    made.close()


@pytest.mark.parametrize("kind", MODULES)
def test_columns_are_turned_by_time_height_or_width(kind: str, pool: WorkerPool) -> None:
    make, model_type, rope = MODULES[kind]
    module = make(tiny_config(model_type, rope_parameters={**ROPE, **rope}, head_dim=16))
    operator = KRotaryEmbedding(module, "rotary_emb", OperatorConfig(None, pool))
    x = torch.zeros(1, 7, 64)
    text = POSITIONS[:1].expand(3, 1, -1)
    for positions in (POSITIONS, text, text.contiguous()):
        for got, want in zip(operator(x, positions), module(x, positions), strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1.2e-7 * 2)  # as tests/operators/test_operators.py
    for one, other in zip(operator(x, text), operator(x, text.contiguous()), strict=True):
        assert torch.equal(one, other)


def test_a_module_of_one_axis_is_asked_in_vain(pool: WorkerPool) -> None:
    operator = KRotaryEmbedding(LlamaRotaryEmbedding(tiny_config("llama")), "rotary_emb", OperatorConfig(None, pool))
    with pytest.raises((UnsupportedError, RuntimeError)):
        operator(torch.zeros(1, 7, 64), POSITIONS)


SIZE, LENS = 4, (19, 7)  # positions of a page; of the sequences
STRETCHES = ((0, 3, 8), (0, 9, 17), (1, 2, 5))
"""Of the sequences' positions, (sequence, first, last + 1)."""


def step(pool: WorkerPool) -> tuple[ForwardContext, AttentionCall]:
    """All positions of both sequences, in pages out of order."""
    generator = torch.Generator().manual_seed(1)
    cache = PagedCache([LayerShape(2, 8, 8)], 10, SIZE)
    keys, values = cache.layer(0)
    for part in (keys, values):
        part.copy_(torch.randn(part.shape, generator=generator))
    table = torch.tensor([[7, 2, 9, 0, 5], [4, 1, 0, 0, 0]], dtype=torch.int32)
    seq_ids = torch.tensor([0] * LENS[0] + [1] * LENS[1], dtype=torch.int32)
    kv_lens = torch.cat([torch.arange(length) for length in LENS]).int() + 1
    ends, starts, shown = kv_lens.clone(), kv_lens - 1, torch.zeros(len(kv_lens), dtype=torch.bool)
    for seq, first, end in STRETCHES:
        inside = (seq_ids == seq) & (kv_lens > first) & (kv_lens <= end)
        ends[inside], starts[inside], shown = end, first, shown | inside
    rows = shown.nonzero()[:, 0]
    pictures = PictureRows(rows, torch.zeros(len(rows), 1), ends=ends, starts=starts)
    slots = torch.zeros(len(kv_lens), dtype=torch.int64)
    context = ForwardContext(cache, pool, Phase.PREFILL, SIZE, slots, seq_ids, kv_lens, table, pictures=pictures)
    q = torch.randn(len(kv_lens), 4, 8, generator=generator)
    return context, AttentionCall(q, keys, values, context.pages, 8**-0.5)


def by_mask(context: ForwardContext, call: AttentionCall, window: int, *, ends: bool, starts: bool) -> torch.Tensor:
    """The same by a mask of all positions, in fp64."""
    pictures, found = context.pictures, []
    assert pictures is not None
    for row, query in enumerate(call.q.double()):
        seq, own = int(context.seq_ids[row]), int(context.kv_lens[row]) - 1
        places = torch.arange(LENS[seq])
        seen = places <= own
        first, end = (int(of[row]) for of in (pictures.starts, pictures.ends))  # type: ignore[index]
        whole = (places >= first) & (places < end)
        near = places > own - window if window else torch.ones_like(seen)
        if ends:
            seen = (seen & near) | whole if starts else (seen | whole) & near
        else:
            seen &= near
        slots = context.block_table[seq, places // SIZE].long() * SIZE + places % SIZE
        keys, values = (part[slots[seen]].double().repeat_interleave(2, dim=1) for part in (call.k_cache, call.v_cache))
        weights = torch.softmax(torch.einsum("hd,phd->hp", query, keys) * call.scale, dim=1)
        found.append(torch.einsum("hp,phd->hd", weights, values))
    return torch.stack(found).float()


@pytest.mark.parametrize("window", [0, 2, 6])
@pytest.mark.parametrize(("in_full", "in_windows", "starts"), [(1, 1, 0), (1, 1, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0)])
def test_rows_see_their_picture(window: int, in_full: int, in_windows: int, starts: int, pool: WorkerPool) -> None:
    context, call = step(pool)
    call, pictures = replace(call, window=window), context.pictures
    assert pictures is not None
    seen = replace(pictures, ends_in_full=bool(in_full), ends_in_windows=bool(in_windows))
    seen = seen if starts else replace(seen, starts=None)
    got = attend_pictures(call, replace(context, pictures=seen), partial(cpu.attention, pool=pool))
    sees = bool(in_windows if window else in_full)
    want = by_mask(context, call, window, ends=sees, starts=bool(starts and window))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    plain = cpu.attention(call, pool)
    is_shown = torch.zeros(len(got), dtype=torch.bool)
    is_shown[pictures.rows] = True
    assert torch.equal(got[~is_shown], plain[~is_shown])
    assert torch.equal(got, plain) != sees


def test_a_picture_adds_behind_layers() -> None:
    rows = PictureRows(torch.tensor([1, 3]), torch.zeros(2, 2), {0: torch.ones(2, 2), 1: torch.full((2, 2), 5.0)})
    hidden = torch.zeros(1, 4, 2)
    assert rows.add_behind(1, hidden)[0, :, 0].tolist() == [0, 5, 0, 5]
    assert rows.add_behind(2, hidden) is hidden
    assert not hidden.any()
