"""Triton's interpreter, without work that it repeats: half of the time of every interpreted kernel."""

from __future__ import annotations

import functools
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
