"""Triton's interpreter as the tests use it: comparisons give masks, and what it repeats is done once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core
from triton.runtime import interpreter


def quicken() -> None:
    """For this process, which interprets all of its kernels. What a kernel computes stays as it is.

    Every launch, and every call of a device function, looks through triton.language for functions to replace by those
    of the interpreter: here that happens once, and nothing is put back. The numpy type of a Triton type is looked up in
    a table that is built for each look: here it is kept. A block type makes its own copy when asked for its type in the
    interpreter, which is itself. Sums and products of integers are computed in int64, too, for an assertion that the
    interpreter, which has no debug mode, leaves out: here its operands are left out as well.
    """
    patch, of_scalar = interpreter._patch_lang, functools.cache(interpreter._get_np_dtype)

    @functools.cache
    def patch_once() -> interpreter._LangPatchScope:
        patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        return interpreter._LangPatchScope()  # nothing to put back

    def np_dtype(dtype: tl.dtype) -> np.dtype[Any]:
        element = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else of_scalar(element)

    interpreter._patch_lang = lambda function: patch_once()
    interpreter._get_np_dtype = np_dtype
    tl.block_type.to_ir = lambda block, builder: block
    interpreter.interpreter_semantic.binary_op_sanitize_overflow_impl = lambda lhs, rhs, binary_op: None
    interpreter._patch_attr = _patch_attr
    _keep_shapes()


def _patch_attr(owner: object, name: str, member: Callable[..., Any], builder: object, scope: Any) -> None:
    """Put the interpreter's semantics into a function's arguments: without a copy of them, or a look whether it did."""
    checks_semantic = getattr(member, "__code__", None) is core.builtin(lambda: None).__code__
    call, semantic = member.__wrapped__ if checks_semantic else member, interpreter.interpreter_semantic

    def interpreted(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return call(*args, **kwargs)

    scope.set_attr(owner, name, interpreted)


def _keep_shapes() -> None:
    """Check and wrap each shape once, not for each of its blocks, and let blocks of one shape be as they are.

    Shapes are tuples that nobody changes: all blocks of a shape have the same one.
    """
    semantic, unwrap, equals = interpreter.interpreter_semantic, core._unwrap_if_constexpr, core.dtype.__eq__
    broadcast = semantic.broadcast_impl_value

    @functools.cache
    def of_sizes(sizes: tuple[int, ...]) -> tuple[core.tuple, int, core.tuple, core.constexpr]:
        if not sizes:
            raise TypeError("0d block_type is forbidden")
        numel = core.validate_block_shape(sizes)
        wrapped = core.tuple([core.constexpr(size) for size in sizes])
        return core.tuple(sizes), numel, wrapped, core.constexpr(numel)

    def block_init(block: core.block_type, element_ty: core.dtype, shape: Any) -> None:
        block.element_ty = element_ty
        sizes = tuple(size if type(size) is int else unwrap(size) for size in unwrap(shape))
        block.shape, block.numel, *block.of_tensor = of_sizes(sizes)

    of_scalar = core.tuple([]), core.constexpr(1)

    def tensor_init(tensor: core.tensor, handle: Any, kind: core.dtype) -> None:
        tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
        tensor.shape, tensor.numel = kind.of_tensor if kind.is_block() else of_scalar

    def broadcast_unless_equal(lhs: core.tensor, rhs: core.tensor) -> tuple[core.tensor, core.tensor]:
        return (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)

    def unwrap_quickly(value: Any) -> Any:
        return value if type(value) is core.tensor or type(value) is int else unwrap(value)

    core.block_type.__init__, core.tensor.__init__ = block_init, tensor_init
    core.block_type.name = property(lambda block: f"<{block.shape}, {block.element_ty}>")
    core.dtype.__eq__ = lambda dtype, other: dtype is other or equals(dtype, other)
    semantic.broadcast_impl_value = broadcast_unless_equal
    core._unwrap_if_constexpr = unwrap_quickly


def compare_to_masks() -> None:
    """Make comparisons give int1 in this process, as they do when compiled.

    The interpreter computes booleans and labels them with the type of what was compared. Where such a scalar meets a
    vector it is spread out in the type of its label, and the mask of int32 that becomes of both is refused by loads and
    stores of Triton 3.9: `mask=(columns < width) & (row < num_rows)` is the usual way to write one.
    """
    builder = interpreter.InterpreterBuilder
    for name in dir(builder):
        if name.startswith(("create_icmp", "create_fcmp")):
            setattr(builder, name, _as_mask(getattr(builder, name)))


def _as_mask(compare: Callable[..., interpreter.TensorHandle]) -> Callable[..., interpreter.TensorHandle]:
    def compared(*operands: Any) -> interpreter.TensorHandle:
        return interpreter.TensorHandle(compare(*operands).data, tl.int1)

    return compared
