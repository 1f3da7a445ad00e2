"""The bytes that packing gives have not changed: files that were packed before hold them.

Whoever changes them changes `VERSION` in weights/stored_experts/header.py, so that such files are refused, and the
digests here.
"""

from __future__ import annotations

import hashlib
from contextlib import closing

import numpy as np
import torch

from ktransformers.kernels.cpu import PACKED_TYPES, WorkerPool, pack, pack_fp8
from ktransformers.kernels.cpu.base import Isa
from ktransformers.kernels.types import FP8_BLOCK, Fp8Matrix, GroupType, QuantType, RawTensor, row_bytes
from ktransformers.weights.stored_experts.header import VERSION

PACKED_BY_VERSION_1 = """
Q4_0:8d1e33a1 Q4_1:b18c10f1 Q5_0:df63a621 Q5_1:8ad217d1 Q8_0:371033aa Q2_K:007c1e63 Q3_K:0d7abc20 Q4_K:26da23a0
Q5_K:a70b47ed Q6_K:98a1cc10 IQ2_XXS:46f1baea IQ2_XS:49f39edf IQ3_XXS:9aae7de8 IQ1_S:e624fc8a IQ4_NL:8d1e33a1
IQ3_S:7378759f IQ2_S:546c8977 IQ4_XS:756d92d2 IQ1_M:1bda2135 TQ1_0:5221b531 TQ2_0:8b8d34b2 MXFP4:bdb01570
NVFP4:59886e44 Q1_0:977dfd87 IQ2_K:0c51cd4a IQ3_K:4d42e40c IQ4_K:a1000d6b IQ5_K:a9fefc7c IQ6_K:6eee0f16
IQ4_KS:e93f8f8b IQ2_KS:46fe01f9 IQ4_KSS:7ed6d4eb IQ5_KS:4da62d64 IQ2_KT:38dad498 IQ3_KT:24f5faef IQ4_KT:954a3cee
IQ3_KS:579ff346 IQ1_KT:a1f57acd IQ2_KL:77272668 I4_32_F16:8d1e33a1 I8_32_F16:371033aa I4_32_F16_Z:b55ca264
I8_32_F16_Z:31dd6434
F8_32_F16:d9193c9e I4_32_BF16:8d1e33a1 I8_32_BF16:371033aa I4_32_BF16_Z:b55ca264 I8_32_BF16_Z:31dd6434
F8_32_BF16:d9193c9e I4_32_F32:c2aac1ea I8_32_F32:2186ae87 I4_32_F32_Z:dfae024d I8_32_F32_Z:cc9e1030
F8_32_F32:e8f2bf2e I4_128_F16:4ce2e1ce I8_128_F16:c8ef1a8f I4_128_F16_Z:2f874980 I8_128_F16_Z:76631d95
F8_128_F16:339347f3 I4_128_BF16:4ce2e1ce I8_128_BF16:c8ef1a8f I4_128_BF16_Z:2f874980 I8_128_BF16_Z:76631d95
F8_128_BF16:339347f3 I4_128_F32:aa246858 I8_128_F32:66d1280e I4_128_F32_Z:cb11445f I8_128_F32_Z:c63bc4db
F8_128_F32:e2a86590 MXFP8:4fadabe9 NVFP4_F32:06678b2d BF16:76d1d580 F8_E4M3:78152ace
"""
ROWS, COLS = 24, 512


def _digest(data: np.ndarray) -> str:
    return hashlib.blake2b(data.tobytes(), digest_size=4).hexdigest()


def made() -> dict[str, str]:
    """By type."""
    found, draw = {}, np.random.Generator(np.random.PCG64(7))
    blocks = draw.integers(0, 256, ROWS * 4 * COLS, dtype=np.uint8)
    with closing(WorkerPool(1, isa=Isa.AVX512_BF16_EMULATED)) as pool:
        for qtype in (*sorted(PACKED_TYPES), *GroupType, QuantType.BF16):
            data = torch.from_numpy(blocks[: ROWS * row_bytes(qtype, COLS)])
            found[qtype.name] = _digest(pack(RawTensor(data, qtype, (ROWS, COLS)), pool).data.numpy())
        codes, scales = (
            torch.from_numpy(blocks[: ROWS * COLS]).view(ROWS, COLS),
            torch.full((1, COLS // FP8_BLOCK), 0.5),
        )
        found["F8_E4M3"] = _digest(pack_fp8(Fp8Matrix(codes, scales), pool).data.numpy())
    return found


def test_packed_layouts_are_those_of_this_version() -> None:
    wanted = dict(pair.split(":") for pair in PACKED_BY_VERSION_1.split())
    found = made()
    assert VERSION == 1
    assert {name for name, digest in found.items() if wanted.get(name) != digest} == set()
    assert found.keys() == wanted.keys()
