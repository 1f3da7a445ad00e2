"""Probes what a module computes: it runs on random rows, and whichever spec gives the same numbers is its own.

Names do not tell: families add 1 to a norm's weight, clamp an activation, scale what they add. So there are no family
names here. Every recognizer is made of these parts:

    module ── probe_module: made-up weights ── answer ──> its numbers ──┐
    StandIn in the places of its children                               │
    ProbeInputs, the same in every run                              matching ──> spec, or None and one line in the log
    specs ── compute: the formula in plain torch ─────────────────┘

A module that raises is not what is looked for: any family's module may be asked, and may refuse in any way. Who asked
keeps the spec; nothing is remembered by class, because modules of one class may differ.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from ktransformers.operators.comparison import close

__all__ = [
    "Constant",
    "NotRecognized",
    "ProbeInputs",
    "StandIn",
    "answer",
    "close",
    "first_of",
    "made_of",
    "matching",
    "probe_module",
    "recognizer",
]

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec")
P = ParamSpec("P")

_logged = set[tuple[str, type[nn.Module]]]()


class NotRecognized(Exception):
    """A module is not what is looked for. The message says why."""


class ProbeInputs:
    """Source of random fp32 numbers, the same in every run."""

    def __init__(self, seed: int = 0):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Return standard normal numbers times `scale`, fp32."""
        return torch.randn(shape, generator=self._generator) * scale

    def positive(self, *shape: int) -> Tensor:
        """Return random numbers between 0.5 and 1.5, as weights of norms are."""
        return torch.rand(shape, generator=self._generator) + 0.5


def probe_module(
    module: nn.Module,
    *,
    parameters: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
    **attributes: object,
) -> nn.Module:
    """Return a copy of `module`, which may be on `meta`, that holds these instead of its own; None: it shares
    its own.
    """
    probe = copy.copy(module)
    held = {"_parameters": parameters, "_buffers": buffers, "_modules": modules}
    probe.__dict__.update(attributes, **{name: dict(own) for name, own in held.items() if own is not None})
    return probe


class StandIn(nn.Module):
    """A child of a probe that computes `function` of what it is given. seen: keywords of its last call, but for hidden
    states. weight: fp32 [1], because some modules look at the type of their children's.
    """

    def __init__(self, function: Callable[..., object]):
        super().__init__()
        self.function, self.weight, self.seen = function, torch.ones(1), dict[str, object]()

    def forward(self, *args: object, **kwargs: object) -> object:
        """Keep the keywords and call the function."""
        self.seen = {name: value for name, value in kwargs.items() if name != "hidden_states"}
        return self.function(*args, **kwargs)


class Constant(nn.Module):
    """A child of a probe that gives copies of `values`, a tuple if they are several, whatever the one thing is that it
    is given.
    """

    def __init__(self, *values: Tensor):
        super().__init__()
        self.values = values

    def forward(self, given: object) -> Tensor | tuple[Tensor, ...]:
        """Return copies, which the module may change in place."""
        values = tuple(value.clone() for value in self.values)
        return values[0] if len(values) == 1 else values


def made_of(module: nn.Module) -> set[str]:
    """Return the names of the children that a module has."""
    return {name for name, _ in module.named_children()}


def answer(call: Callable[[], Spec]) -> Spec:
    """Return what a call of a module returns. Raises NotRecognized when it raises anything."""
    try:
        with torch.no_grad():
            return call()
    except Exception as error:
        raise NotRecognized(f"asked, it raises {type(error).__name__}: {error}") from error


def matching(want: object, specs: Iterable[Spec], compute: Callable[[Spec], Tensor]) -> Spec:
    """Return the first spec whose numbers are `want`, a module's. Raises NotRecognized when there is none."""
    for spec in specs:
        if close(want, compute(spec)):
            return spec
    raise NotRecognized("no formula that kernels know gives its numbers")


def first_of(ways: Iterable[Callable[[], Spec]]) -> Spec:
    """Return what the first way of asking that succeeds finds. Raises NotRecognized, for the reason of the last, when
    all do.
    """
    reason = NotRecognized("there is no way to ask it")
    for way in ways:
        try:
            return way()
        except NotRecognized as error:
            reason = error
    raise reason


def recognizer(
    what: str, level: int = logging.INFO
) -> Callable[[Callable[Concatenate[nn.Module, P], Spec]], Callable[Concatenate[nn.Module, P], Spec | None]]:
    """Decorate a function to return None where it raises NotRecognized, and to log why, once for each class of modules.

    what: the modules that it looks for, as the log names them.
    """

    def made(ask: Callable[Concatenate[nn.Module, P], Spec]) -> Callable[Concatenate[nn.Module, P], Spec | None]:
        @functools.wraps(ask)
        def asked(module: nn.Module, /, *args: P.args, **kwargs: P.kwargs) -> Spec | None:
            try:
                return ask(module, *args, **kwargs)
            except NotRecognized as reason:
                key = what, type(module)
                if key not in _logged:
                    _logged.add(key)
                    logger.log(level, "%s is not %s, so its own forward runs: %s", key[1].__name__, what, reason)
                return None

        return asked

    return made
