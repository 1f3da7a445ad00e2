"""Expert matrices that a file keeps in another order: bytes of the same numbers."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels.types import QuantType, RawTensor
from ktransformers.weights.experts import FloatMatrix, load_matrices


@pytest.mark.parametrize(("dtype", "qtype"), [(torch.bfloat16, QuantType.BF16), (torch.float16, QuantType.F16)])
@pytest.mark.parametrize("target", [QuantType.BF16, QuantType.F16, QuantType.F32])
def test_parts_of_a_fused_tensor(dtype: torch.dtype, qtype: QuantType, target: QuantType) -> None:
    fused = torch.randn(150, 200, generator=torch.Generator().manual_seed(1)).to(dtype)
    parts = [fused.T[:100], fused.T[1::2], fused.T[100:200]]
    wanted = {QuantType.BF16: torch.bfloat16, QuantType.F16: torch.float16, QuantType.F32: torch.float32}[target]
    for part, made in zip(parts, load_matrices([FloatMatrix(part) for part in parts], target), strict=True):
        assert isinstance(made, RawTensor)
        assert (made.qtype, made.shape) == (target, (100, 150))
        values = part.float().contiguous() if dtype is not wanted else part.contiguous()
        assert torch.equal(made.data.view(wanted).view(100, 150), values.to(wanted))


def test_rows_in_turn() -> None:
    fused = torch.arange(60 * 70, dtype=torch.int16).view(torch.bfloat16).view(60, 70)
    parts = [fused[::2], fused[1::2]]
    for part, made in zip(parts, load_matrices([FloatMatrix(part) for part in parts], QuantType.BF16), strict=True):
        assert isinstance(made, RawTensor)
        assert torch.equal(made.data.view(torch.int16), part.contiguous().view(torch.int16).view(-1))
