"""Random tensors, and how near a result must be to that in fp64."""

from __future__ import annotations

import torch

# One rounding to the output's type (half a unit of 2^-10 or 2^-7 relative); fp32 sums of some thousand terms.
RELATIVE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def close(out, want, absolute=1e-5):
    torch.testing.assert_close(out.double().cpu(), want.double().cpu(), rtol=RELATIVE[out.dtype], atol=absolute)


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(device)
