"""The rotation of queries and keys in plain torch, as the caches of latent attention and of indexers have them."""

from __future__ import annotations

import torch

__all__ = ["rotate", "rotated_columns"]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """Rotate fp32 x [T, heads, P] by angles [T, P / 2].

    Pairs are (0, 1), (2, 3), ... when interleaved, else (0, P / 2), (1, P / 2 + 1), ...; the result holds first all
    first members, then all second ones, which leaves the dot product of two rotated vectors unchanged.
    """
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def rotated_columns(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, is_interleaved: bool = False
) -> torch.Tensor:
    """Return x [T, heads, D] with its first P columns rotated as `rotate` does, the others as they are."""
    rotary = 2 * cos.shape[-1]
    return torch.cat((rotate(x[..., :rotary], cos, sin, is_interleaved), x[..., rotary:]), dim=-1)
