"""Transcoding: bit-for-bit the values that gguf decodes, for every type that gguf can decode."""

from __future__ import annotations

import gguf.quants
import numpy as np
import pytest
import torch

from ktransformers.errors import UnsupportedError
from ktransformers.kernels.cpu import NATIVE_TYPES, PACKED_TYPES
from ktransformers.kernels.formats import FORMATS
from ktransformers.kernels.types import QuantType as T
from ktransformers.kernels.types import RawTensor, block_size, row_bytes, type_size
from ktransformers.weights.quantize.transcode import dequantize, resident_type, transcode
from tests.support.checks import decoding
from tests.support.checks.decoding import parts_of_rows, set_row_scales

DECODABLE = sorted({*map(T, gguf.quants._type_traits)} | PACKED_TYPES)
FLOATS = (T.F32, T.F16, T.BF16)
BECOMES = {
    **dict.fromkeys((T.Q5_0, T.IQ4_NL), T.Q8_0),
    T.Q3_K: T.Q6_K,
    **dict.fromkeys((T.TQ1_0, T.TQ2_0), T.Q4_0),
    T.Q1_0: T.Q4_0,
    T.NVFP4: T.BF16,
}
"""What a type becomes that only the CPU's kernels read."""


def random_blocks(qtype: T, rows: int = 5, blocks: int = 3) -> RawTensor:
    """Random bytes with finite fp16 scales."""
    rng = np.random.default_rng(qtype.value)
    block, nbytes = block_size(qtype), type_size(qtype)
    if qtype in FLOATS:
        values = torch.from_numpy(rng.standard_normal((rows, 96)).astype(np.float32))
        return RawTensor.from_tensor(
            values.to({T.F32: torch.float32, T.F16: torch.float16, T.BF16: torch.bfloat16}[qtype])
        )
    stored = rng.integers(0, 256, size=(rows, row_bytes(qtype, blocks * block)), dtype=np.uint8)
    heads, by_row = parts_of_rows(stored, qtype)
    set_row_scales(heads, rng.standard_normal(rows) * 0.01)
    data = by_row.reshape(-1, nbytes)  # a view, where there is something to set
    if qtype is T.IQ1_M:
        data[:, 55] &= 0x3F  # the top nibble of the last scale word is the top of its fp16 scale
    for at in FORMATS[qtype].halves:
        scale = (rng.standard_normal(len(data)) * 0.01).astype(np.float16)
        data[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return RawTensor(torch.from_numpy(stored.reshape(-1)), qtype, (rows, blocks * block))


def decoded(raw: RawTensor) -> np.ndarray:
    assert isinstance(raw.qtype, T)
    with np.errstate(all="ignore"):
        return decoding.decoded(raw.data.numpy().reshape(raw.rows, -1), raw.qtype)


@pytest.mark.parametrize("qtype", [*DECODABLE, T.F32, T.F16], ids=lambda t: t.name)
def test_transcoded_values_are_bit_equal(qtype: T) -> None:
    raw = random_blocks(qtype)
    out = transcode(raw, "x")
    assert out.qtype is resident_type(qtype, "x")
    assert out.qtype in NATIVE_TYPES
    assert out.shape == raw.shape
    want = decoded(raw)
    if qtype is not T.IQ1_M:
        assert np.isfinite(want).all()
    assert (decoded(out).view(np.uint32) == want.view(np.uint32)).all()


@pytest.mark.parametrize("qtype", BECOMES, ids=lambda t: t.name)
def test_other_types_with_the_same_values(qtype: T) -> None:
    raw = random_blocks(qtype)
    out = transcode(raw, "x", BECOMES[qtype])
    assert out.qtype is BECOMES[qtype]
    assert out.shape == raw.shape
    assert (decoded(out).view(np.uint32) == decoded(raw).view(np.uint32)).all()


@pytest.mark.parametrize("qtype", [*DECODABLE, T.F32, T.F16], ids=lambda t: t.name)
def test_dequantize_is_bit_equal_and_rounds_once(qtype: T) -> None:
    raw = random_blocks(qtype)
    want = decoded(raw)
    assert (dequantize(raw, "x").numpy().view(np.uint32) == want.view(np.uint32)).all()
    half = dequantize(raw, "x", torch.bfloat16)
    assert torch.equal(half.view(torch.int16), torch.from_numpy(want.copy()).to(torch.bfloat16).view(torch.int16))


def test_every_nvfp4_scale_survives() -> None:
    blocks = np.zeros((256, 36), dtype=np.uint8)
    blocks[:, :4] = np.arange(256)[:, None]
    blocks[:, 4:] = np.tile(np.arange(16) * 17, 2)
    raw = RawTensor(torch.from_numpy(blocks.reshape(-1)), T.NVFP4, (256, 64))
    assert (decoded(transcode(raw, "x", T.BF16)).view(np.uint32) == decoded(raw).view(np.uint32)).all()


@pytest.mark.parametrize("qtype", [T.Q5_0, T.IQ4_NL, T.Q3_K, T.TQ2_0, T.Q1_0], ids=lambda t: t.name)
def test_infinite_and_nan_scales_do_not_warn_or_crash(qtype: T) -> None:
    block, nbytes = block_size(qtype), type_size(qtype)
    raw = RawTensor(torch.full((nbytes * 2,), 0xFF, dtype=torch.uint8), qtype, (1, 2 * block))
    assert transcode(raw, "x", BECOMES[qtype]).shape == raw.shape


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = random_blocks(T.Q3_K, rows=7)
    whole = transcode(raw, "x", T.Q6_K).data
    monkeypatch.setattr("ktransformers.weights.quantize.transcode.CHUNK_WEIGHTS", 1)
    assert torch.equal(transcode(raw, "x", T.Q6_K).data, whole)


def test_native_types_are_not_copied() -> None:
    raw = random_blocks(T.Q4_K)
    assert transcode(raw, "x") is raw


@pytest.mark.parametrize("qtype", [T.I32, T.I8, T.F64, T.Q8_1, T.Q8_K], ids=lambda t: t.name)
def test_other_types_are_refused_by_name(qtype: T) -> None:
    with pytest.raises(UnsupportedError, match=rf"'blk\.0\.x'.*{qtype.name}"):
        resident_type(qtype, "blk.0.x")
