"""gather_rows: the rows of a table in parts are those of its parts, whatever lies between these."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.cpu import dequantize_rows, gather_rows
from ktransformers.kernels.types import QuantType, RawTensor


@pytest.mark.parametrize("qtype", [QuantType.BF16, QuantType.Q8_0, QuantType.IQ4_NL], ids=lambda t: t.name)
def test_rows_are_those_of_the_parts(qtype, make_weight, pools):
    parts = [make_weight(qtype, rows, 160) for rows in (3, 1, 20)]
    whole = RawTensor(torch.cat([part.data for part in parts]), qtype, (24, 160))
    ids = torch.randint(0, 24, (5000,), generator=torch.Generator().manual_seed(1))  # of several tasks
    ids[:4] = torch.tensor([0, 2, 3, 23])
    for pool in pools:
        want = dequantize_rows(whole, ids, pool)
        assert torch.equal(gather_rows(parts, ids, pool), want)
        out = torch.empty_like(want)
        assert gather_rows([whole], ids, pool, out).data_ptr() == out.data_ptr()
        assert torch.equal(out, want)
    assert gather_rows(parts, ids[:0], pools[0]).shape == (0, 160)


def test_rows_of_a_mapped_file(tmp_path, make_weight, pool):
    """Pages that are asked for ahead may end with the file."""
    weight = make_weight(QuantType.Q8_0, 300, 64)
    path = tmp_path / "table"
    path.write_bytes(weight.data.numpy().tobytes())
    mapped = torch.from_file(str(path), size=weight.nbytes, dtype=torch.uint8)
    ids = torch.tensor([299, 0, 150])
    assert torch.equal(
        gather_rows([RawTensor(mapped, weight.qtype, weight.shape)], ids, pool), dequantize_rows(weight, ids, pool)
    )


def test_bad_arguments_are_named(make_weight, pool):
    parts = [make_weight(QuantType.Q8_0, 3, 64), make_weight(QuantType.Q8_0, 2, 64)]
    with pytest.raises(IndexError, match=r"ids\[1\] is 5, but the table has 5 rows"):
        gather_rows(parts, torch.tensor([4, 5]), pool)
    with pytest.raises(IndexError, match="-1"):
        gather_rows(parts, torch.tensor([-1]), pool)
    with pytest.raises(ValueError, match="one type and width, got 2"):
        gather_rows([*parts, make_weight(QuantType.Q8_0, 2, 32)], torch.tensor([0]), pool)
