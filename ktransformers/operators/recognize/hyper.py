"""Recognizes modules that are hyper-connections as kernels compute them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.kernels.triton.attention.hyper import HyperSpec
from ktransformers.operators.recognize.probe import NotRecognized, ProbeInputs, answer, close, probe_module, recognizer

__all__ = ["collapsed", "recognize_hyper"]

_NAMES = ("fn", "base", "scale")


def collapsed(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, spec: HyperSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapse streams [T, N, H] as `kernels.triton.attention.hyper.collapse` does, in plain torch."""
    num = spec.streams
    sizes = [num, num, num * num]
    flat = streams.flatten(1)
    mixed = (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + spec.norm_eps)) @ fn.T
    weights = zip(torch.split(mixed, sizes, -1), torch.split(base, sizes), scale, strict=True)
    before, behind, between = (part * factor + more for part, more, factor in weights)
    comb = between.view(-1, num, num).softmax(-1) + spec.eps
    comb = comb / (comb.sum(-2, keepdim=True) + spec.eps)
    for _ in range(spec.iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + spec.eps)
        comb = comb / (comb.sum(-2, keepdim=True) + spec.eps)
    return 2 * behind.sigmoid(), comb, ((before.sigmoid() + spec.eps)[..., None] * streams).sum(1)


@recognizer("hyper-connections that kernels compute")
def recognize_hyper(module: nn.Module) -> HyperSpec:
    """Return how `module` collapses streams, of any width; None for anything else."""
    if set(module._parameters) != set(_NAMES):
        raise NotRecognized(f"it holds {', '.join(sorted(module._parameters)) or 'no weights'}")
    given: Any = module
    spec = answer(
        lambda: HyperSpec(
            int(given.hc_mult), int(given.hc_sinkhorn_iters), float(given.hc_eps), float(given.input_norm.eps)
        )
    )
    if spec.streams & (spec.streams - 1):
        raise NotRecognized(f"its {spec.streams} streams are no power of two")
    probe_inputs, width = ProbeInputs(), 16
    streams = probe_inputs.normal(3, spec.streams, width)
    weights = (
        probe_inputs.normal(spec.width, spec.streams * width),
        probe_inputs.normal(spec.width),
        probe_inputs.positive(3),
    )
    probe = probe_module(module, parameters=dict(zip(_NAMES, weights, strict=True)))
    got = answer(lambda: probe(streams[None]))
    want = collapsed(streams, *weights, spec)
    if not isinstance(got, tuple) or len(got) != 3:
        raise NotRecognized("it returns something else")
    if not all(close(a, b[None]) for a, b in zip(got, want, strict=True)):
        raise NotRecognized("no formula that kernels know gives its numbers")
    return spec
