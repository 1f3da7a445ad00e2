"""Which activation a module computes, alone or between the projections of experts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ktransformers.kernels.types import Activation, ActivationSpec
from ktransformers.operators.recognize.probe import Draws, Unlike, answer, matching, recognizer, twin_of
from ktransformers.weights.source import ExpertsLayout

__all__ = ["recognize_activation", "recognize_expert_activation"]

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


def _rows(cols: int) -> Tensor:
    """Beyond +-20, to tell clamped activations from others."""
    return Draws().normal(64, cols, scale=8.0)


def _gated(spec: ActivationSpec, gate: Tensor, up: Tensor) -> Tensor:
    """act(gate) * up."""
    if spec.kind is not Activation.SWIGLU_OAI:
        return _FORMULAS[spec.kind](gate) * up
    gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
    return gate * torch.sigmoid(spec.alpha * gate) * (up + 1)


@recognizer("an activation that kernels compute", logging.DEBUG)  # every kind of module is asked
def recognize_activation(module: nn.Module) -> ActivationSpec:
    """The activation that `module` computes element by element; None for another one, or anything else."""
    if any(True for _ in module.children()) or any(True for _ in module.parameters()):
        raise Unlike("it holds other modules or weights")
    rows = _rows(_COLS)
    return matching(answer(lambda: module(rows)), _PLAIN, lambda spec: _FORMULAS[spec.kind](rows))


def _forward_of_one(module: nn.Module, rows: Tensor) -> Tensor:
    """[T, I] of rows [T, 2 I] by the forward of an experts module, whose first expert hands them on."""
    cols = rows.shape[-1]
    first, last = torch.eye(cols)[None], torch.eye(cols, cols // 2)[None]
    twin = twin_of(module, parameters={"gate_up_proj": first, "down_proj": last})
    ids = torch.zeros(len(rows), 2, dtype=torch.int64)  # one expert a row is a case that some forwards do not know
    output: Tensor = twin(rows, ids, torch.tensor([1.0, 0.0]).expand(len(rows), 2))
    return output[:, : cols // 2]


@recognizer("an experts module whose activation kernels compute", logging.DEBUG)  # the operator warns
def recognize_expert_activation(module: nn.Module, layout: ExpertsLayout) -> ActivationSpec:
    """What an experts module of `transformers` computes between its projections; None where no kernel does."""
    rows = _rows(2 * _COLS if layout.has_gate else _COLS)
    if layout.has_gate and not hasattr(module, "_apply_gate"):
        want = answer(lambda: _forward_of_one(module, rows))
    else:
        want = answer(lambda: getattr(module, "_apply_gate" if layout.has_gate else "act_fn")(rows))
    if not layout.has_gate:
        return matching(want, _PLAIN, lambda spec: _FORMULAS[spec.kind](rows))
    gate, up = rows.chunk(2, dim=-1) if layout.is_concatenated else (rows[..., ::2], rows[..., 1::2])
    specs, limit = list(_PLAIN), getattr(module, "limit", None)
    alpha = getattr(module, "alpha", getattr(module, "swiglu_alpha", None))
    if isinstance(alpha, (int, float)) and isinstance(limit, (int, float)):
        specs.append(ActivationSpec(Activation.SWIGLU_OAI, float(alpha), float(limit)))
    return matching(want, specs, lambda spec: _gated(spec, gate, up))
