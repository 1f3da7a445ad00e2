"""The rotation of queries and keys in plain torch: of latent attention, of indexers, and of what is recognized."""

from __future__ import annotations

import torch

__all__ = ["real_parts", "rotate", "rotated_columns"]


def rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool, *, keeps_places: bool = False
) -> torch.Tensor:
    """Rotate fp32 x [T, heads, P] by angles [T, P / 2].

    Pairs are (0, 1), (2, 3), ... when interleaved, else (0, P / 2), (1, P / 2 + 1), ...; the result holds first all
    first members, then all second ones, which leaves the dot product of two rotated vectors unchanged. keeps_places:
    the members of a pair stay where they were.
    """
    half = x.shape[-1] // 2
    a, b = (x[..., ::2], x[..., 1::2]) if is_interleaved else (x[..., :half], x[..., half:])
    cos, sin = cos[:, None], sin[:, None]
    members = a * cos - b * sin, b * cos + a * sin
    return torch.stack(members, dim=-1).flatten(-2) if is_interleaved and keeps_places else torch.cat(members, dim=-1)


def rotated_columns(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    is_interleaved: bool = False,
    keeps_places: bool = False,
) -> torch.Tensor:
    """Return x [T, heads, D] with its first P columns rotated as `rotate` does, the others as they are."""
    rotary = 2 * cos.shape[-1]
    rotated = rotate(x[..., :rotary], cos, sin, is_interleaved, keeps_places=keeps_places)
    return torch.cat((rotated, x[..., rotary:]), dim=-1)


def real_parts(angles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin [T, P / 2] of complex [1, T, P / 2]."""
    return angles[0].real.contiguous(), angles[0].imag.contiguous()
