"""Records of a call of attention: parts of them are calls of those rows, and what an implementation cannot take it
refuses.
"""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import cpu, reference
from ktransformers.kernels.attention_call import AttentionCall, RowPages, TopkCall
from ktransformers.kernels.triton.attention.mla import mla_attention

PAGE = 4


def made() -> AttentionCall:
    generator = torch.Generator().manual_seed(0)
    table = torch.randperm(6, generator=generator).to(torch.int32).view(2, 3)
    pages = RowPages(table, PAGE, torch.tensor([0, 1, 1]), torch.tensor([9, 3, 4]))
    caches = (torch.randn(6 * PAGE, 1, 8, generator=generator) for _ in range(2))
    q = torch.randn(3, 2, 8, generator=generator)
    return AttentionCall(q, *caches, pages, 0.3, window=5, sinks=torch.tensor([0.5, -1.0]), softcap=4.0)


def test_a_part_of_a_call_is_the_call_of_those_rows(pool: cpu.WorkerPool) -> None:
    call = made()
    whole = cpu.attention(call, pool)
    for rows in (slice(0, 1), slice(1, 3), slice(0, 0), slice(0, 3)):
        assert torch.equal(cpu.attention(call.of(rows), pool), whole[rows])
    torch.testing.assert_close(whole, reference.attention(call), rtol=1e-5, atol=1e-5)
    picked = call.pages.of(torch.tensor([2, 0]))
    assert (picked.seq_ids.tolist(), picked.kv_lens.tolist(), picked.room) == ([1, 0], [4, 9], 12)


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_part_of_a_choice_is_the_choice_of_those_rows(is_summed: bool, pool: cpu.WorkerPool) -> None:
    call = made()
    weights = torch.tensor([[1.0, 2.0], [0.5, 1.0], [1.0, 1.0]]) if is_summed else None
    choice = TopkCall(call.q, weights, call.k_cache[:, 0], call.pages, 0.3, 2)
    slots, counts = cpu.select_topk_positions(choice, pool)
    each = choice.choices_per_row
    assert each == (1 if is_summed else 2)
    part = cpu.select_topk_positions(choice.of(slice(1, 3)), pool)
    assert torch.equal(part[0], slots[each:])
    assert torch.equal(part[1], counts[each:])
    want = reference.select_topk_positions(choice)
    assert [row[:count].tolist() for row, count in zip(slots, counts.tolist(), strict=True)] == want


def test_what_an_implementation_cannot_take_is_refused() -> None:
    call = made()
    codes = AttentionCall(call.q, call.k_cache, call.v_cache, call.pages, 0.3, scales=(torch.ones(24, 1, 1), None))
    with pytest.raises(ValueError, match="the oracle takes no codes"):
        reference.attention(codes)
    keys = torch.zeros(24, 1, 24)
    latent = AttentionCall(torch.zeros(3, 2, 24), keys, keys[..., :16].clone(), call.pages, 0.3)
    with pytest.raises(ValueError, match="the first columns of k_cache for v_cache"):
        mla_attention(latent)
