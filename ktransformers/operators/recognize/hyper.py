"""Recognizes modules that are hyper-connections as kernels compute them: those of DeepSeek-V4, and streams with gates
(Qwen4's)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ktransformers.kernels.types import HyperSpec
from ktransformers.operators.recognize.norm import rms_norm
from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    StandIn,
    answer,
    close,
    made_of,
    matching,
    probe_module,
    recognizer,
)

__all__ = ["GatedSpec", "collapsed", "recognize_gated", "recognize_hyper"]

_NAMES = ("fn", "base", "scale")
_PRODUCTS = ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight")


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """Numbers of streams with gates (kernels.triton.attention.gated_streams). streams: N. offset: what is added to the
    norm's weight. has_weights: whether a block's result is added to the streams afterwards.
    """

    streams: int
    eps: float
    offset: float
    has_weights: bool


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


@recognizer("streams with gates that kernels compute")
def recognize_gated(module: nn.Module) -> GatedSpec:
    """Return how `module` collapses streams [1, T, N H]; None for anything else."""
    names = made_of(module)
    has_weights = "block_inject_weight" in names
    if module._parameters or names != {"hc_norm", *_PRODUCTS[: 2 + has_weights]}:
        raise NotRecognized("it is made of other parts")
    given: Any = module
    streams, width, eps = answer(lambda: (int(given.hc_count), int(given.hidden_size), float(given.hc_norm.eps)))
    inputs, columns = ProbeInputs(), streams * width
    rows, scale = inputs.normal(3, columns), inputs.positive(columns)
    products = [
        inputs.normal(8, columns, scale=columns**-0.5),
        inputs.normal(columns, 8),
        inputs.normal(streams, columns),
    ]
    children = {name: _product(weight) for name, weight in zip(_PRODUCTS, products, strict=True)}
    children["hc_norm"] = probe_module(given.hc_norm, parameters={"weight": scale})
    missing = {} if has_weights else {"block_inject_weight": None}
    probe = probe_module(module, modules={name: children[name] for name in names}, **missing)
    got = answer(lambda: probe(rows[None]))
    parts = got if isinstance(got, tuple) else (got,)
    if has_weights and (len(parts) != 3 or not close(parts[1], rows[None])):
        raise NotRecognized("it returns something else")
    want = torch.cat([parts[0][0], parts[2][0]] if has_weights else [parts[0][0]], dim=1)
    specs = [GatedSpec(streams, eps, offset, has_weights) for offset in (1.0, 0.0)]
    return matching(want, specs, lambda spec: _gated(rows, scale, products, spec))


def _product(weight: Tensor) -> nn.Module:
    return StandIn(lambda x: x @ weight.T)


def _gated(rows: Tensor, scale: Tensor, products: list[Tensor], spec: GatedSpec) -> Tensor:
    """What streams [T, N H] collapse to, and the weights of a block's result behind it, in plain torch."""
    shape = (len(rows), spec.streams, -1)
    parts = rms_norm(rows.view(shape), (spec.offset + scale).view(spec.streams, -1), spec.eps)
    normed, (down, up, inject) = parts.flatten(1), products
    narrow = torch.nn.functional.silu(normed @ down.T / spec.streams)
    found = (torch.sigmoid(narrow @ up.T).view(shape) * parts).mean(1)
    weights = 2 * torch.sigmoid(normed @ inject.T / spec.streams)
    return torch.cat((found, weights), dim=1) if spec.has_weights else found
