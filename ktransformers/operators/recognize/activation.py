"""Recognizes the activation that a module computes, alone or between the projections of experts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.recognize.probe import (
    NotRecognized,
    ProbeInputs,
    StandIn,
    answer,
    matching,
    probe_module,
    recognizer,
)
from ktransformers.weights.source import ExpertsLayout

__all__ = ["expert_activation", "recognize_activation", "recognize_expert_activation", "recognize_gated_mlp"]

_FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: functional.silu,
    Activation.GELU: functional.gelu,
    Activation.GELU_TANH: lambda x: functional.gelu(x, approximate="tanh"),
    Activation.RELU: functional.relu,
    Activation.RELU2: lambda x: functional.relu(x).square(),
    Activation.SIGMOID: torch.sigmoid,
}
_PLAIN = tuple(ActivationSpec(kind) for kind in _FORMULAS)  # of one argument
_COLS = 32
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def _rows(cols: int) -> Tensor:
    """Beyond +-20, to tell clamped activations from others."""
    return ProbeInputs().normal(64, cols, scale=8.0)


def _gated(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up."""
    if not spec.kind.is_clamped:
        return _FORMULAS[spec.kind](gate) * up
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    if spec.kind is Activation.SWIGLU_CLAMPED:
        return functional.silu(gate) * up
    return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)


@recognizer("an activation that kernels compute", logging.DEBUG)  # every kind of module is asked
def recognize_activation(module: nn.Module) -> ActivationSpec:
    """Return the activation that `module` computes element by element; None for another one, or anything else."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        raise NotRecognized("it holds other modules or weights")
    rows = _rows(_COLS)
    return matching(answer(lambda: module(rows)), _PLAIN, lambda spec: _FORMULAS[spec.kind](rows))


def expert_activation(module: nn.Module, layout: ExpertsLayout) -> Callable[[Tensor], Tensor]:
    """Return an experts module's own activation: [..., 2 I] -> [..., I] with a gate, else of [..., I]. Does not make it
    a child.
    """
    if not layout.has_gate or hasattr(module, "_apply_gate"):
        return lambda rows: getattr(module, "_apply_gate" if layout.has_gate else "act_fn")(rows)
    return lambda rows: module.act_fn(rows[..., : rows.shape[-1] // 2]) * rows[..., rows.shape[-1] // 2 :]  # type: ignore[operator]


@recognizer("a feed-forward block of gate, up and down")
def recognize_gated_mlp(module: nn.Module) -> ActivationSpec:
    """Return the activation of a block that computes down(act(gate(x)) * up(x)), clamped or not; None for others.

    Its projections are gate_proj, up_proj and down_proj, and its activation act_fn.
    """
    # Products with numbers of their own, large enough that clamping shows.
    gate, up, down = (StandIn(partial(torch.mul, torch.tensor(2.0 + i))) for i in range(len(_PROJECTIONS)))
    children = dict(module.named_children())
    if children.keys() != {*_PROJECTIONS, "act_fn"}:
        raise NotRecognized(f"it is made of {', '.join(sorted(children))}")
    spec = recognize_activation(children["act_fn"])
    if spec is None:
        raise NotRecognized("no kernel computes its activation")
    rows = _rows(_COLS)
    parts = {**dict(zip(_PROJECTIONS, (gate, up, down), strict=True)), "act_fn": children["act_fn"]}
    got = answer(lambda: probe_module(module, modules=parts)(rows))
    specs, limit = [spec], _limit_of(module)
    if spec.kind is Activation.SILU and isinstance(limit, int | float):
        specs.append(ActivationSpec(Activation.SWIGLU_CLAMPED, limit=float(limit)))
    return matching(got, specs, lambda found: down(_gated(found, gate(rows), up(rows))))


def _limit_of(module: nn.Module) -> object:
    return getattr(module, "limit", getattr(module, "swiglu_limit", None))


def _forward_of_one(module: nn.Module, rows: Tensor) -> Tensor:
    """[T, I] of rows [T, 2 I] by the forward of an experts module, whose first expert hands them on."""
    cols = rows.shape[-1]
    first, last = torch.eye(cols)[None], torch.eye(cols, cols // 2)[None]
    probe = probe_module(module, parameters={"gate_up_proj": first, "down_proj": last})
    ids = torch.zeros(len(rows), 2, dtype=torch.int64)  # one expert a row is a case that some forwards do not know
    output: Tensor = probe(rows, ids, torch.tensor([1.0, 0.0]).expand(len(rows), 2))
    return output[:, : cols // 2]


@recognizer("an experts module whose activation kernels compute", logging.DEBUG)  # the operator warns
def recognize_expert_activation(module: nn.Module, layout: ExpertsLayout) -> ActivationSpec:
    """Return the activation between the projections of an experts module of `transformers`; None where no kernel has
    it.
    """
    rows = _rows(2 * _COLS if layout.has_gate else _COLS)
    if layout.has_gate and not hasattr(module, "_apply_gate"):
        want = answer(lambda: _forward_of_one(module, rows))
    else:
        want = answer(lambda: expert_activation(module, layout)(rows))
    if not layout.has_gate:
        return matching(want, _PLAIN, lambda spec: _FORMULAS[spec.kind](rows))
    gate, up = rows.chunk(2, dim=-1) if layout.is_concatenated else (rows[..., ::2], rows[..., 1::2])
    specs, limit = list(_PLAIN), _limit_of(module)
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
    if isinstance(limit, (int, float)):
        specs.append(ActivationSpec(Activation.SWIGLU_CLAMPED, limit=float(limit)))
    if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
        specs.append(ActivationSpec(Activation.SWIGLU_OAI, float(alpha), float(limit)))
    return matching(want, specs, lambda spec: _gated(spec, gate, up))
