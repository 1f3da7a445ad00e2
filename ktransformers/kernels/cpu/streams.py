"""Residual streams of a token (hyper-connections): they become the input of a block, and its result is mixed with them.

    T rows, N streams of H columns each, S shares of their N H columns

What is computed stands in csrc/ops/layer/streams.h.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ktransformers.kernels.cpu.base import WorkerPool, check_tensor
from ktransformers.kernels.extension import extension
from ktransformers.kernels.types import HyperSpec
from ktransformers.kernels.untraced import untraced

__all__ = ["MAX_STREAMS", "collapse_streams", "gate_streams", "mix_streams", "norm_streams", "split_columns"]

MAX_STREAMS = extension.MAX_STREAMS
"""Most streams of a token."""

_SHARES, _SHARE = 32, 16  # at most so many shares, of a multiple of so many columns


def split_columns(fn: Tensor) -> Tensor:
    """Return a matrix [M, N H] as `collapse_streams` reads it: [S, M, N H / S], the columns of each share together."""
    rows, columns = fn.shape
    shares = max(1, math.gcd(columns, _SHARES * _SHARE) // _SHARE)
    return fn.view(rows, shares, columns // shares).transpose(0, 1).contiguous()


def _check_streams(x: Tensor) -> tuple[int, int, int]:
    check_tensor("streams", x, (None, None, None))
    rows, streams, hidden = x.shape
    if not 1 <= streams <= MAX_STREAMS:
        raise ValueError(f"there must be 1 to {MAX_STREAMS} streams, got {streams}")
    return rows, streams, hidden


@untraced
def collapse_streams(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: HyperSpec, pool: WorkerPool
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse streams [T, N, H]: post [T, N], comb [T, N, N] and collapsed [T, H].

    fn: [S, (2 + N) N, N H / S], of `split_columns`. base: [(2 + N) N]. scale: [3].
    """
    rows, streams, hidden = _check_streams(x)
    check_tensor("fn", fn, (None, spec.width, None))
    shares, width, share = fn.shape
    if streams != spec.streams or shares * share != streams * hidden:
        raise ValueError(f"streams must be {spec.streams} of {shares * share} columns in all, got {list(x.shape)}")
    check_tensor("base", base, (width,))
    check_tensor("scale", scale, (3,))
    shapes = (rows, shares, width), (rows, streams), (rows, streams, streams), (rows, hidden)
    products, post, comb, out = (torch.empty(shape) for shape in shapes)
    extension.collapse_streams(
        pool.handle,
        x.data_ptr(),
        (fn.data_ptr(), base.data_ptr(), scale.data_ptr()),
        (rows, streams, hidden, shares, spec.iterations),
        (float(spec.eps), float(spec.norm_eps)),
        (products.data_ptr(), post.data_ptr(), comb.data_ptr(), out.data_ptr()),
    )
    return post, comb, out


@untraced
def mix_streams(x: Tensor, y: Tensor, post: Tensor, comb: Tensor, pool: WorkerPool) -> None:
    """Mix the result y [T, H] of a block with its streams x [T, N, H], in place: stream m becomes
    post[m] y + sum_n comb[n, m] x[n].

    post: [T, N]. comb: [T, N, N].
    """
    rows, streams, hidden = _check_streams(x)
    check_tensor("y", y, (rows, hidden))
    check_tensor("post", post, (rows, streams))
    check_tensor("comb", comb, (rows, streams, streams))
    extension.mix_streams(
        pool.handle, x.data_ptr(), rows, streams, hidden, y.data_ptr(), post.data_ptr(), comb.data_ptr()
    )


@untraced
def norm_streams(x: Tensor, weight: Tensor, eps: float, streams: int, pool: WorkerPool) -> Tensor:
    """Normalize each of the streams of rows [T, N H] (RMSNorm) and multiply it with its part of weight [N H]: the same
    shape.
    """
    check_tensor("x", x, (None, None))
    rows, columns = x.shape
    check_tensor("weight", weight, (columns,))
    if streams < 1 or columns % streams:
        raise ValueError(f"{columns} columns are no {streams} streams")
    out = torch.empty_like(x)
    extension.norm_streams(
        pool.handle, x.data_ptr(), weight.data_ptr(), rows, streams, columns // streams, float(eps), out.data_ptr()
    )
    return out


@untraced
def gate_streams(normed: Tensor, gates: Tensor, streams: int, pool: WorkerPool) -> Tensor:
    """Collapse streams [T, N H] by gates of the same shape, which are overwritten: the mean of the streams, each times
    the sigmoid of its gates, [T, H].
    """
    check_tensor("normed", normed, (None, None))
    rows, columns = normed.shape
    check_tensor("gates", gates, (rows, columns))
    if not 1 <= streams <= MAX_STREAMS or columns % streams:
        raise ValueError(f"{columns} columns are no {streams} streams, of which there may be {MAX_STREAMS}")
    out = torch.empty(rows, columns // streams)
    extension.gate_streams(
        pool.handle, normed.data_ptr(), rows, streams, columns // streams, gates.data_ptr(), out.data_ptr()
    )
    return out
