"""Records what modules are given and return while a step runs, or runs something else in their place.

Every check of a loaded model watches it in this one way: a module's `forward` is replaced for as long as a block lasts.
So arguments are seen as the module itself gets them, behind its hooks, and results in front of them:

    caller ── pre-hooks ── args, kwargs recorded ── forward ── output recorded ── hooks ── caller

Knows modules and tensors, and nothing of what is looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = [
    "RecordedCall",
    "fp32_copy",
    "intercepted",
    "is_watched",
    "recorded_calls",
    "replaced_forwards",
    "tensors_in",
]


@dataclass(slots=True)
class RecordedCall:
    """A call of a module, named `key` by whoever records it. output: None of a call that failed."""

    key: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: object = None

    @property
    def hidden_states(self) -> torch.Tensor:
        """The hidden states that a decoder layer was given: its first argument, or the one of that name."""
        hidden: torch.Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return hidden


@contextmanager
def replaced_forwards(forwards: Iterable[tuple[nn.Module, Callable[..., object]]]) -> Iterator[None]:
    """Let each module run the function beside it in place of its own forward, while the block runs."""
    with ExitStack() as stack:
        for module, forward in forwards:
            stack.callback(_restore, module, vars(module).get("forward"))
            module.forward = forward
        yield


def _restore(module: nn.Module, forward: Callable[..., object] | None) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward


@contextmanager
def intercepted(modules: Iterable[tuple[Hashable, nn.Module]], run: Callable[..., object]) -> Iterator[None]:
    """Call `run(key, forward, *args, **kwargs)`, whose result is returned, where one of the modules would run its own
    `forward`, while the block runs.
    """
    with replaced_forwards((module, partial(run, key, module.forward)) for key, module in modules):
        yield


@contextmanager
def recorded_calls(modules: Iterable[tuple[Hashable, nn.Module]]) -> Iterator[list[RecordedCall]]:
    """Yield a list that gets the calls of the modules, in the order in which they end, those too that fail.

    Tensors are copied, because modules may change in place what they are given.
    """
    calls: list[RecordedCall] = []

    def run(key: Hashable, forward: Callable[..., object], /, *args: Any, **kwargs: Any) -> object:
        call = RecordedCall(key, *_copied((args, kwargs), {}))
        try:
            output = forward(*args, **kwargs)
            call.output = _copied(output, {})
        finally:
            calls.append(call)
        return output

    with intercepted(modules, run):
        yield calls


def is_watched(module: nn.Module) -> bool:
    """Whether hooks or a recorder look at what `module` runs, so that nothing may be computed without calling it."""
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _copied(value: Any, memo: dict[int, torch.Tensor]) -> Any:
    """`value` with copies in the places of its tensors, which are one where they were one."""
    if isinstance(value, torch.Tensor):
        return memo.setdefault(id(value), value if id(value) in memo else value.detach().clone())
    if isinstance(value, dict):
        return {name: _copied(part, memo) for name, part in value.items()}
    return type(value)([_copied(part, memo) for part in value]) if type(value) in (tuple, list) else value


def fp32_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of `tensor` in fp32 on the CPU."""
    return tensor.detach().to("cpu", torch.float32, copy=True)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield all tensors in `value`, which may be one, or tuples, lists and dicts of them."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors_in(part)
