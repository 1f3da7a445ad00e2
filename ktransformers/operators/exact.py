"""Keeps torch's own code from making a token's result depend on who shares its step.

BLAS sums in another order for another number of rows, and torch computes a tensor's last elements, and the ends of each
thread's share, with other code than the rest. Operators avoid both; this module covers what runs inside Hugging Face's
forwards: routers always, and the whole step when a rule file leaves linears or activations in place.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Self, cast

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from ktransformers.kernels import cpu
from ktransformers.kernels.types import Activation, ActivationSpec, QuantType, RawTensor
from ktransformers.operators.base import Operator
from ktransformers.operators.recognize.activation import recognize_activation

__all__ = ["NativeMathMode", "exact_math", "modules_on_torch"]

_ELEMENTWISE: dict[Any, Activation] = {
    torch.sigmoid: Activation.SIGMOID,
    torch.Tensor.sigmoid: Activation.SIGMOID,
    functional.sigmoid: Activation.SIGMOID,
    functional.silu: Activation.SILU,
    functional.gelu: Activation.GELU,
}


_TRANSCENDENTAL: frozenset[Any] = frozenset(
    {functional.softplus, torch.tanh, torch.Tensor.tanh, functional.tanh, torch.exp, torch.Tensor.exp}
    | {torch.cos, torch.Tensor.cos, torch.sin, torch.Tensor.sin, torch.log, torch.Tensor.log, torch.log1p, torch.erf}
)
"""What torch computes with one code in whole vectors, and with another in what is left at the end."""

_PRODUCTS: frozenset[Any] = frozenset({torch.mul, torch.Tensor.mul, torch.Tensor.__mul__})
"""Of complex numbers, as some rotations are computed: fused additions in whole vectors, none in what is left."""

_VECTOR = 64  # elements; a multiple of every vector's and every unrolled loop's
_BLOCK = 32768  # elements; torch shares more than these among threads, at borders of its own


def _is_plain(*tensors: torch.Tensor | None) -> bool:
    return all(t is None or (t.dtype is torch.float32 and t.device.type == "cpu") for t in tensors)


class NativeMathMode(TorchFunctionMode):
    """While active, linear, addmm with a bias, sigmoid, silu and gelu of torch on fp32 CPU tensors run on native
    kernels; exponentials and their kin are computed in whole vectors, complex products part by part. Also where
    function modes were turned off around it, as native layers do."""

    def __init__(self, pool: cpu.WorkerPool):
        super().__init__()
        self.pool = pool
        self._entered: list[ExitStack] = []

    @override
    def __enter__(self) -> Self:
        enabled = cast(AbstractContextManager[None], torch._C._EnableTorchFunction())
        with ExitStack() as stack:
            stack.enter_context(enabled)
            super().__enter__()  # type: ignore[no-untyped-call]
            self._entered.append(stack.pop_all())
        return self

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.pop().close()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is functional.linear:
            return self._linear(*args, **kwargs)
        if func is torch.addmm and not kwargs and len(args) == 3 and args[0].dim() == 1:
            return self._addmm(*args)
        if func in _ELEMENTWISE:
            return self._elementwise(func, *args, **kwargs)
        if func in _TRANSCENDENTAL and args and kwargs.get("out") is None and _is_plain(args[0]):
            return _in_whole_vectors(func, *args, **kwargs)
        if func in _PRODUCTS and len(args) == 2 and not kwargs and all(map(_is_complex, args)):
            return _complex_product(*args)
        return func(*args, **kwargs)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.dim() != 2 or not _is_plain(input, weight, bias):
            return functional.linear(input, weight, bias)
        raw = RawTensor.from_tensor(weight.detach().contiguous())
        assert raw.qtype is QuantType.F32
        out = cpu.linear(input.reshape(-1, input.shape[-1]).contiguous(), raw, self.pool, bias=bias)
        return out.view(*input.shape[:-1], weight.shape[0])

    def _addmm(self, bias: torch.Tensor, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A linear layer whose weight lies the other way round, [in, out]: GPT-2's."""
        if not _is_plain(bias, input, weight):
            return torch.addmm(bias, input, weight)
        return self._linear(input, weight.t(), bias)

    def _elementwise(self, func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        kind = _ELEMENTWISE[func]
        if kwargs.get("approximate") == "tanh" and kind is Activation.GELU:
            kind = Activation.GELU_TANH
        out = kwargs.get("inplace", False) or kwargs.get("out") is not None or args
        if out or not _is_plain(input):
            return func(input, *args, **kwargs)
        return cpu.activate(ActivationSpec(kind), None, input.contiguous(), self.pool)


def exact_math(operator: Operator) -> AbstractContextManager[object]:
    """Return NativeMathMode, around what an operator computes in torch on the CPU; on a GPU nothing."""
    return nullcontext() if operator.device.is_gpu else NativeMathMode(operator.config.require_pool())


def _is_complex(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype is torch.complex64 and value.device.type == "cpu"


def _complex_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each product and sum rounded on its own."""
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)


def _in_whole_vectors(func: Callable[..., Any], input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    padded = functional.pad(input.reshape(-1), (0, -input.numel() % _VECTOR))
    blocks = [func(block, *args, **kwargs) for block in torch.split(padded, _BLOCK)]
    result = blocks[0] if len(blocks) == 1 else torch.cat(blocks)
    return result[: input.numel()].view(input.shape)


_NAMES = frozenset(function.__name__ for function in (*_ELEMENTWISE, *_TRANSCENDENTAL))


@functools.cache
def _computes(forward: Callable[..., Any], depth: int = 2) -> bool:
    """Whether a module's forward, or functions of its file that it calls, ask torch for an activation or the like."""
    function = inspect.unwrap(forward)
    code = getattr(function, "__code__", None)
    if code is None:
        return False
    names = set(code.co_names)
    if names & _NAMES:
        return True
    found = (function.__globals__.get(name) for name in names) if depth else ()
    called = (one for one in found if inspect.isfunction(one) and one.__module__ == function.__module__)
    return any(_computes(one, depth - 1) for one in called)


def modules_on_torch(model: nn.Module) -> list[str]:
    """Return the dotted names of modules whose matrix products or activations would run on torch's own code."""
    return sorted(_walk(model, ""))


def _walk(module: nn.Module, key: str) -> Iterator[str]:
    if isinstance(module, Operator):
        bypassed = {id(part) for part in module.bypassed()}
    else:
        bypassed = set()
        has_matrix = any(p.dim() > 1 for p in module.parameters(recurse=False))
        has_matrix = has_matrix and not isinstance(module, nn.Embedding)
        if has_matrix or recognize_activation(module) is not None or _computes(type(module).forward):
            yield key
    for name, child in module.named_children():
        if id(child) not in bypassed:
            yield from _walk_inner(child, f"{key}.{name}" if key else name, bypassed)


def _walk_inner(module: nn.Module, key: str, bypassed: set[int]) -> Iterator[str]:
    """`_walk`, for a module that may be the one an operator holds: some of its children are never called."""
    if not bypassed:
        yield from _walk(module, key)
        return
    for name, child in module.named_children():
        if id(child) not in bypassed:
            yield from _walk(child, f"{key}.{name}")
