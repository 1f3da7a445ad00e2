"""Triton's interpreter as the tests use it: comparisons give masks, and what it repeats is done once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def quicken() -> None:
    """For this process, which interprets all of its kernels. What a kernel computes stays as it is.

    Every launch, and every call of a device function, looks through triton.language for functions to replace by those
    of the interpreter: here that happens once, and nothing is put back. The numpy type of a Triton type is looked up in
    a table that is built for each look: here it is kept. A block type makes its own copy when asked for its type in the
    interpreter, which is itself.
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
