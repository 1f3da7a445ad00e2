"""Attention on expanded latents against fp64: ragged sequences, tails of tiles, heads and rows that are left alone."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.triton.attention.materialized import (
    MaterializedRun,
    MaterializedTile,
    materialized_attention,
    materialized_tile,
    tiles_of,
)

# As in test_attention: the probabilities' and the result's rounding, half a unit of 2^-11 (fp16) or 2^-8 (bf16) each.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
SMALL = MaterializedTile(16, 16, 4, 2)

# (rows, positions) of each sequence
RAGGED = [(1, 1), (33, 33), (16, 40), (5, 64), (17, 17)]


def runs_of(sequences, gap=0):
    row, offset, runs = gap, 0, []
    for num_rows, length in sequences:
        runs.append(MaterializedRun(row, num_rows, offset, length))
        row, offset = row + num_rows + gap, offset + length
    return runs, row, offset


def case(sequences, heads, dims, dtype, device, gap=0):
    nope, rope, v_dim = dims
    runs, num_rows, num_positions = runs_of(sequences, gap)
    generator = torch.Generator().manual_seed(0)

    def made(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, q_rot = made(num_rows, heads, nope + rope), made(num_rows, heads, rope)
    beside = made(num_positions, 24 + rope)  # latents, whose last columns are the shared keys
    keys, values = made(heads, num_positions, nope), made(heads, num_positions, v_dim)
    return runs, q, q_rot, keys, beside[:, 24:], values


def attended(runs, q, q_rot, keys, k_rot, values, scale):
    """In fp64, row by row."""
    q, q_rot, keys, k_rot, values = (x.double().cpu() for x in (q, q_rot, keys, k_rot, values))
    want = torch.full((q.shape[0], q.shape[1], values.shape[2]), 7.0, dtype=torch.float64)
    nope = keys.shape[2]
    for run in runs:
        for i in range(run.num_rows):
            seen = slice(run.offset, run.offset + run.length - run.num_rows + 1 + i)
            row = run.first_row + i
            logits = torch.einsum("hd,hld->hl", q[row, :, :nope], keys[:, seen])
            logits += torch.einsum("hd,ld->hl", q_rot[row], k_rot[seen])
            want[row] = torch.einsum("hl,hlv->hv", torch.softmax(logits * scale, 1), values[:, seen])
    return want.float()


def check(sequences, heads, dims, dtype, device, tile=SMALL, gap=0):
    runs, *tensors = case(sequences, heads, dims, dtype, device, gap)
    q, values = tensors[0], tensors[4]
    scale = (dims[0] + dims[1]) ** -0.5
    out = torch.full((q.shape[0], heads, dims[2]), 7.0, dtype=dtype, device=device)
    tiles = tiles_of(runs, tile.block_m).to(device)
    materialized_attention((tensors[0], tensors[1]), tuple(tensors[2:]), tiles, scale, out, tile)
    want = attended(runs, *tensors, scale)
    torch.testing.assert_close(out.float().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert values.dtype is dtype


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_ragged_sequences(dtype, device):
    check(RAGGED, 3, (32, 16, 32), dtype, device)


@pytest.mark.parametrize("dims", [(24, 8, 40), (16, 16, 16), (48, 20, 8)], ids=str)
def test_dimensions_that_are_no_powers_of_two(dims, device):
    check(RAGGED[:3], 2, dims, torch.float16, device)


@pytest.mark.exhaustive
def test_the_shape_of_deepseek(device):
    dims = (128, 64, 128)
    check([(70, 200), (3, 131)], 2, dims, torch.bfloat16, device, materialized_tile(73, 2, torch.bfloat16, device))
    check([(130, 300)], 2, dims, torch.bfloat16, device, materialized_tile(1 << 20, 2, torch.bfloat16, device))
    check([(70, 100)], 1, dims, torch.float32, device, materialized_tile(70, 1, torch.float32, device))


def test_rows_of_others_stay(device):
    check(RAGGED, 2, (16, 16, 16), torch.float16, device, gap=3)


def test_a_row_does_not_depend_on_its_neighbours(device):
    """Alone, and in a step of several sequences: `==`."""
    runs, q, q_rot, keys, k_rot, values = case(RAGGED, 2, (32, 16, 32), torch.float16, device)
    both = torch.zeros(2, q.shape[0], 2, 32, dtype=torch.float16, device=device)
    materialized_attention((q, q_rot), (keys, k_rot, values), tiles_of(runs, 16).to(device), 0.1, both[0], SMALL)
    for run in runs:
        tiles = tiles_of([run], 16).to(device)
        materialized_attention((q, q_rot), (keys, k_rot, values), tiles, 0.1, both[1], SMALL)
    assert torch.equal(both[0], both[1])


def test_views_of_some_heads(device):
    """Groups of heads, one after another, are all heads at once."""
    runs, q, q_rot, keys, k_rot, values = case(RAGGED, 4, (32, 16, 32), torch.float16, device)
    tiles = tiles_of(runs, 16).to(device)
    both = torch.zeros(2, q.shape[0], 4, 32, dtype=torch.float16, device=device)
    materialized_attention((q, q_rot), (keys, k_rot, values), tiles, 0.1, both[0], SMALL)
    for heads in (slice(0, 3), slice(3, 4)):
        part = (q[:, heads], q_rot[:, heads]), (keys[heads], k_rot, values[heads])
        materialized_attention(*part, tiles, 0.1, both[1, :, heads], SMALL)
    assert torch.equal(both[0], both[1])


def test_tiles_cover_every_row_once_and_begin_with_the_longest():
    runs, num_rows, _ = runs_of(RAGGED)
    tiles = tiles_of(runs, 16).tolist()
    rows = sorted(row for first, count, _, _ in tiles for row in range(first, first + count))
    assert rows == list(range(num_rows))
    assert [tile[3] for tile in tiles] == sorted((tile[3] for tile in tiles), reverse=True)
    assert tiles_of([], 16).shape == (0, 4)


def test_bad_arguments_are_named(device):
    runs, q, q_rot, keys, k_rot, values = case(RAGGED, 2, (16, 16, 16), torch.float16, device)
    out, tiles = torch.empty(q.shape[0], 2, 16, dtype=torch.float16, device=device), tiles_of(runs, 16).to(device)
    good = (q, q_rot, keys, k_rot, values, tiles, 0.1, out, SMALL)
    for index, bad, said in (
        (0, q[..., :8], "must fit"),
        (1, q_rot[:3], "q_rot must have shape"),
        (2, keys.transpose(0, 1).contiguous().transpose(0, 1), "contiguous"),
        (3, k_rot[:9], "k_rot must have shape"),
        (4, values.int(), "values must be fp16"),
        (5, tiles.long(), "tiles must be"),
        (6, 0.0, "scale positive"),
        (7, out[:3], "out must have shape"),
    ):
        given = [*good[:index], bad, *good[index + 1 :]]
        with pytest.raises((ValueError, TypeError), match=said):
            materialized_attention(tuple(given[:2]), tuple(given[2:5]), *given[5:])
    with pytest.raises(TypeError, match="give one type"):
        materialized_attention((q, q_rot), (keys.float(), k_rot, values), *good[5:])
