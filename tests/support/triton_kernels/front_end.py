"""Runs Triton's front end over launches as on an H100, without a GPU: what it says of kernels, and no machine code.

    python -m tests.support.triton_kernels.front_end [--all]

The interpreter leaves out what follows `if CONSTANT: return ...`, the compiler visits it. Prints how many variants are
there, and each error with its kernel. Without --all a few types of every kind, with one and with twenty rows.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton._C.libtriton import ir
from triton.compiler.compiler import make_backend

from ktransformers.kernels.types import FORK_TYPES, GroupType, QuantType
from tests.support.triton_kernels import compile_launches as launches
from tests.support.triton_kernels.compile_launches import CPU_PACKED_TYPES, GpuLayout

ERRORS: Counter[str] = Counter()
NUM = Counter[str]()
FEW = (
    *(GroupType[name] for name in ("I4_32_F16_Z", "I8_128_BF16", "F8_128_F32", "MXFP8", "NVFP4_F32")),
    *(QuantType[name] for name in ("Q2_K", "TQ1_0", "Q1_0", "NVFP4", "IQ4_XS", "IQ2_XS")),
    *sorted(FORK_TYPES),
)


def front_end(source: Any, target: Any, options: Any) -> SimpleNamespace:
    """In place of triton.compile."""
    NUM[source.fn.fn.__name__] += 1
    backend = make_backend(target)
    parsed, context = backend.parse_options(dict(options)), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    codegen, modules = backend.get_codegen_implementation(parsed), backend.get_module_map()
    try:
        source.make_ir(target, parsed, codegen, modules, context)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is reported
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        ERRORS[f"{source.fn.fn.__name__}: {type(cause).__name__}: {str(cause)[-160:]}"] += 1
    return SimpleNamespace(asm={"ptx": "mma .e4m3.e4m3 .s8.s8"}, metadata=SimpleNamespace(shared=0))


def of_types(types: Any, tokens: tuple[int, ...]) -> None:
    for qtype in types:
        for count in tokens:
            launches.call_linear(qtype, 768, 2048, count, GpuLayout.CPU_PACKED)
            launches.call_moe((qtype, qtype), 2048, 768, count, layout=GpuLayout.CPU_PACKED)
        out = torch.empty(768, 512, dtype=torch.float16)
        launches.dequantize(launches.matrix(qtype, 768, 512, GpuLayout.CPU_PACKED), out)


def main() -> int:
    changes: dict[str, Any] = {
        "target": 90,
        "of_a_thread": lambda kernel: (0, 0),
        "triton": SimpleNamespace(compile=front_end, runtime=triton.runtime, knobs=triton.knobs),
        "print": lambda *words, **options: None,
    }
    vars(launches).update(changes)
    launches.runtime.default_shared_bytes = launches.SHARED_BYTES[90]
    triton.runtime.jit.JITFunction.run = launches.compile_launch
    if "--all" in sys.argv:
        launches.everything()
        launches.all_recurrent()
        of_types(sorted(CPU_PACKED_TYPES), (1, 20, 300))
    else:
        of_types(FEW, (1, 20))
    for error, count in ERRORS.items():
        print(f"{error} ({count} times)")
    print(f"{sum(NUM.values())} variants, {sum(ERRORS.values()) or 'no'} error")
    return bool(ERRORS)


if __name__ == "__main__":
    sys.exit(main())
