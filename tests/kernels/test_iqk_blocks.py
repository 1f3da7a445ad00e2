"""Types of ik_llama.cpp: decoded as that program does, from rows whose scales precede their blocks, too."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from ktransformers.kernels import cpu
from ktransformers.kernels.blocks import decode_blocks
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.iqk_blocks import IQK_TYPES, IQK_VALUES
from ktransformers.kernels.trellis_blocks import TRELLIS_TYPES
from ktransformers.kernels.types import FORK_TYPES, QuantType, RawTensor, row_bytes
from ktransformers.weights.cut_source import TensorSlice, cut_tensor
from tests.support.checks.decoding import decoded, parts_of_rows, set_row_scales

COLS = 1024

# Of what ik_llama.cpp 8337e4cd's dequantize_row_... make of `random_rows`: the first bytes of SHA-256 of their floats.
# IQ6_K's is a polynomial, which rounds to the values that its products look up. Zeros of IQ3_KT, which it gives signs,
# are + 0.
DIGESTS = {
    QuantType.IQ2_K: "b61f2580b9160051",
    QuantType.IQ3_K: "5e1e10b3b80fa851",
    QuantType.IQ4_K: "55cecfa9793e1130",
    QuantType.IQ5_K: "742a0ff25a153686",
    QuantType.IQ2_KS: "36ca9991509d1149",
    QuantType.IQ3_KS: "1b6a7414a5355c61",
    QuantType.IQ2_KL: "503196a12d2829d1",
    QuantType.IQ4_KS: "a45d93ae4174a524",
    QuantType.IQ4_KSS: "8390e7508d73ccb8",
    QuantType.IQ5_KS: "1c2b2fa6dabcd1ef",
    QuantType.IQ1_KT: "afda6c34824575d0",
    QuantType.IQ2_KT: "57404e2c2f54e541",
    QuantType.IQ3_KT: "061abafdd518326c",
    QuantType.IQ4_KT: "96b30688d877b55a",
}


def random_rows(qtype: QuantType, rows: int = 64) -> np.ndarray:
    rng = np.random.default_rng(int(qtype))
    data = rng.integers(0, 256, (rows, row_bytes(qtype, COLS)), dtype=np.uint8)
    heads, blocks = parts_of_rows(data, qtype)
    set_row_scales(heads, rng.standard_normal(rows) * 0.01)
    for at in FORMATS[qtype].halves:
        scales = (rng.standard_normal(blocks.shape[:2]) * 0.01).astype(np.float16)
        blocks[..., at : at + 2] = scales.view(np.uint8).reshape(*blocks.shape[:2], 2)
    return data


@pytest.mark.parametrize("qtype", DIGESTS, ids=lambda qtype: qtype.name)
def test_floats_are_those_of_ik_llama_cpp(qtype: QuantType) -> None:
    values = decode_blocks(random_rows(qtype), qtype)
    values += 0.0 if qtype is QuantType.IQ3_KT else -0.0
    assert hashlib.sha256(values.tobytes()).hexdigest()[:16] == DIGESTS[qtype]


@pytest.mark.parametrize("qtype", sorted(FORK_TYPES), ids=lambda qtype: qtype.name)
def test_floats_are_those_of_the_oracle(qtype: QuantType) -> None:
    assert FORK_TYPES == IQK_TYPES | TRELLIS_TYPES
    rows = random_rows(qtype, 8)
    want = decoded(rows, qtype)
    assert (decode_blocks(rows, qtype) == want).all()
    raw, pool = RawTensor(torch.from_numpy(rows.reshape(-1)), qtype, (8, COLS)), WorkerPool(1)
    assert (cpu.dequantize_rows(raw, torch.arange(8), pool).numpy() == want).all()
    pool.close()


def test_values_of_iq6_k_are_those_of_its_polynomial_rounded() -> None:
    """With the numbers of ik_llama.cpp's iqk_quantize.cpp."""
    codes = np.arange(64)
    polynomial = -127 + codes * (6.2568 + codes * (-0.11218 + codes * 0.0011972))
    assert (np.rint(polynomial) == IQK_VALUES[QuantType.IQ6_K].values).all()


@pytest.mark.parametrize("qtype", [QuantType.IQ4_KS, QuantType.IQ3_KS, QuantType.IQ4_K], ids=lambda qtype: qtype.name)
def test_parts_of_columns_keep_the_scales_of_rows(qtype: QuantType) -> None:
    rows = random_rows(qtype, 6)
    whole = RawTensor(torch.from_numpy(rows.reshape(-1)), qtype, (6, COLS))
    parts = [cut_tensor(whole, TensorSlice(1, first, count), "x") for first, count in ((0, 256), (256, 768))]
    values = [decoded(part.data.numpy().reshape(6, -1), qtype) for part in parts]
    assert (np.concatenate(values, axis=1) == decoded(rows, qtype)).all()
