"""A step as workers get it: the arrays of the driver's, of any shapes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from ktransformers.core import Phase
from ktransformers.engine.parallel.ranks.messages import Regroup, Step, decode, encode
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.kernels.types import StateStep
from ktransformers.operators.context import ForwardContext, PictureRows


def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(-1, 1000, shape, dtype=dtype)


def longs(count: int) -> torch.Tensor:
    return numbers(count, dtype=torch.int64)


@pytest.mark.parametrize(("rows", "seqs", "pages", "kept"), [(1, 1, 257, 1), (9, 3, 4, 2), (5, 1, 2, 0), (2, 2, 0, 2)])
@pytest.mark.parametrize("has_states", [True, False])
def test_a_step_is_the_same_behind_the_pipe(rows: int, seqs: int, pages: int, kept: int, has_states: bool) -> None:
    cache: Any = object()
    kv_lens = numbers(rows)
    states = None
    if has_states:
        states = StateStep(numbers(seqs + 1), numbers(seqs), numbers(seqs), numbers(rows), kv_lens, 7)
    phase = Phase.PREFILL if rows > 2 else Phase.GENERATE
    table = numbers(seqs, pages + 1)[:, :pages]  # rows that do not touch
    context = ForwardContext(cache, cache, phase, 64, longs(rows), numbers(rows), kv_lens, table, states)
    ids, positions, keep = longs(rows), longs(rows), longs(kept)
    message = decode(encode(Step.of(ForwardBatch(ids, positions, context, keep), True)), Step | Regroup)
    assert message.is_padded
    batch = message.batch(cache, cache)
    got = batch.context
    for one, other in ((batch.token_ids, ids), (batch.positions, positions), (batch.keep, keep)):
        assert torch.equal(one, other)
    for name in ("slot_mapping", "seq_ids", "kv_lens", "block_table"):
        assert torch.equal(getattr(got, name), getattr(context, name)), name
        assert getattr(got, name).dtype == getattr(context, name).dtype
    assert (got.phase, got.page_size, got.cache) == (phase, 64, cache)
    assert (got.states is None) == (states is None)
    for name in ("first_rows", "read_slots", "write_slots", "save_slots", "kv_lens"):
        assert states is None or torch.equal(getattr(got.states, name), getattr(states, name)), name
    assert states is None or got.states.max_rows == 7


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("num_rows", [0, 4])
def test_pictures_come_along(is_whole: bool, num_rows: int) -> None:
    cache: Any = object()
    rows = torch.arange(num_rows)
    hidden, more = torch.randn(num_rows, 8), {-1: torch.randn(num_rows, 8), 7: torch.randn(num_rows, 8)}
    sight = {"ends": numbers(9), "starts": numbers(9), "ends_in_windows": True} if is_whole else {}
    shown = PictureRows(rows, hidden, more, pool_starts=numbers(3, 9, dtype=torch.int64), **sight)
    context = ForwardContext(
        cache, cache, Phase.PREFILL, 64, longs(9), numbers(9), numbers(9), numbers(1, 2), pictures=shown
    )
    positions = longs(9) if is_whole else numbers(3, 9, dtype=torch.int64)
    message = decode(encode(Step.of(ForwardBatch(longs(9), positions, context, longs(2)), False)), Step | Regroup)
    batch = message.batch(cache, cache)
    got = batch.context
    assert torch.equal(batch.positions, positions)
    assert got.pictures is not None
    assert (got.turned is None) == (positions.dim() == 2)
    for one in fields(PictureRows):
        want, found = getattr(shown, one.name), getattr(got.pictures, one.name)
        if one.name == "by_layer":
            assert [*found] == [*want]
            assert all(torch.equal(found[layer], part) for layer, part in want.items())
        else:
            assert torch.equal(found, want) if isinstance(want, torch.Tensor) else found == want, one.name
