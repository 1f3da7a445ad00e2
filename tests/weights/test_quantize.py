"""quantize: layouts decode with gguf's own decoder, errors stay near a brute-force bound, bad input is refused."""

from __future__ import annotations

import ctypes

import gguf.quants
import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES

from benchmarks.peers.llama_library import library_folder
from ktransformers.errors import UnsupportedError, WeightError
from ktransformers.kernels.iqk_blocks import IQK_VALUES
from ktransformers.kernels.types import QuantType as T
from ktransformers.kernels.types import row_bytes
from ktransformers.weights.quantize.grid_search import GRID_TYPES
from ktransformers.weights.quantize.iqk_search import IQK_WRITABLE
from ktransformers.weights.quantize.write import QUANTIZABLE_TYPES, WRITABLE_TYPES, quantize, target_type
from tests.support.checks.decoding import decoded


def relative_rms(values: np.ndarray, qtype: T) -> float:
    return float(np.sqrt(((decoded(quantize(values, qtype), qtype) - values) ** 2).mean() / (values**2).mean()))


def weights(rows: int = 16, cols: int = 1024, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) * np.float32(0.02)


def best_affine_rms(values: np.ndarray, max_code: int) -> float:
    """Brute force over end points, scales and offsets unrounded: a bound that the real format can only approach."""
    x = values.reshape(-1, 32).astype(np.float64)
    low, high = np.minimum(x.min(1), 0), np.maximum(x.max(1), 0)
    best = np.full(len(x), np.inf)
    for cut_low in np.linspace(-0.04, 0.2, 25):
        for cut_high in np.linspace(-0.04, 0.2, 25):
            offset = np.maximum(-(low + (high - low) * cut_low), 0)
            scale = (high - low) * (1 - cut_low - cut_high) / max_code
            codes = np.clip(np.rint((x + offset[:, None]) / scale[:, None]), 0, max_code)
            error = ((codes * scale[:, None] - offset[:, None] - x) ** 2).sum(1)
            best = np.minimum(best, error)
    return float(np.sqrt(best.sum() / (x**2).sum()))


def best_symmetric_rms(values: np.ndarray) -> float:
    x = values.reshape(-1, 16).astype(np.float64)
    best = np.full(len(x), np.inf)
    for sign in (-1, 1):
        for largest_code in np.linspace(24, 40, 129):
            scale = sign * np.abs(x).max(1, keepdims=True) / largest_code
            error = ((np.clip(np.rint(x / scale), -32, 31) * scale - x) ** 2).sum(1)
            best = np.minimum(best, error)
    return float(np.sqrt(best.sum() / (x**2).sum()))


def test_more_bits_err_less() -> None:
    values = weights()
    errors = [relative_rms(values, t) for t in (T.Q4_0, T.Q4_K, T.Q5_K, T.Q6_K, T.Q8_0)]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize(("qtype", "max_code", "slack"), [(T.Q4_K, 15, 1.04), (T.Q5_K, 31, 1.07)])
def test_affine_error_is_near_brute_force(qtype: T, max_code: int, slack: float) -> None:
    # The slack is what rounding scale and offset to 6 bits costs; it weighs more where the codes are finer.
    values = weights(4)
    assert relative_rms(values, qtype) <= slack * best_affine_rms(values, max_code)


def test_symmetric_error_is_near_brute_force() -> None:
    values = weights(4)
    assert relative_rms(values, T.Q6_K) <= 1.06 * best_symmetric_rms(values)


@pytest.mark.parametrize("qtype", QUANTIZABLE_TYPES)
def test_values_on_the_grid_survive(qtype: T) -> None:
    """A block whose values are scale * code comes back within the rounding of its fp16 scale (2**-11)."""
    codes = np.tile(np.arange(-8, 8, dtype=np.float32), (2, 16))
    got = decoded(quantize(codes, qtype), qtype)
    steps = {T.Q8_0: 8 / 127 / 2, T.Q6_K: 8 / 32 / 2, T.Q5_K: 15 / 31 / 2}.get(qtype, 0.0)  # half a step off the grid
    assert np.abs(got - codes).max() <= steps + 16 * 2.0**-9


@pytest.mark.parametrize("qtype", [t for t in WRITABLE_TYPES if t is not T.Q1_0])  # whose magnitudes are all alike
def test_special_blocks(qtype: T) -> None:
    values = np.zeros((6, 256), dtype=np.float32)
    values[1] = 1.5  # constant
    values[2] = -1.5
    values[3] = 1e-9  # its scale is below fp16's smallest
    values[4, 7] = -3.0  # one outlier
    values[5] = 65504.0
    got = decoded(quantize(values, qtype), qtype)
    assert (got[0] == 0).all()
    last = 4 if qtype in GRID_TYPES else 5  # grids have no entries of one large value and zeros
    assert np.abs(got - values).max(axis=1)[1:last].max() <= 3.0 * 2.0**-4
    assert np.isfinite(got).all()
    assert np.abs(got[5] / 65504 - 1).max() < 0.1


def test_q1_0_is_signs_and_the_mean_magnitude() -> None:
    values = np.zeros((3, 256), dtype=np.float32)
    values[1, :128] = np.where(np.arange(128) % 3 == 0, -1, 3)  # 43 times -1: the mean is 298 / 128
    values[2] = -65504.0
    got = decoded(quantize(values, T.Q1_0), T.Q1_0)
    assert (got[0] == 0).all()
    assert (got[1, :128] == np.where(np.arange(128) % 3 == 0, -1, 1) * np.float32(np.float16(298 / 128))).all()
    assert (got[2] == values[2]).all()
    # Where only the columns with -1 count, so does their magnitude.
    importance = np.where(np.arange(256) % 128 % 3 == 0, 1, 0).astype(np.float32)
    assert abs(abs(decoded(quantize(values, T.Q1_0, importance), T.Q1_0)[1, 0]) - 1) < 1e-3


@pytest.mark.parametrize("qtype", WRITABLE_TYPES)
def test_rows_do_not_depend_on_their_neighbours(qtype: T) -> None:
    values = weights(300, 512)
    whole = quantize(values, qtype)
    assert whole.shape == (300, row_bytes(qtype, 512))
    assert whole.dtype == np.uint8
    assert (whole[299:] == quantize(values[299:], qtype)).all()
    assert quantize(values[:0], qtype).shape == (0, whole.shape[1])


def test_bad_input_is_refused() -> None:
    values = weights(2, 256)
    with pytest.raises(UnsupportedError, match="NVFP4"):
        quantize(values, T.NVFP4)
    with pytest.raises(ValueError, match="multiple of 256"):
        quantize(weights(2, 96), T.Q4_K)
    for bad in (np.nan, np.inf, -np.inf, 1e6):
        values[1, 3] = bad
        with pytest.raises(WeightError, match="not finite or exceeds"):
            quantize(values, T.Q6_K)


def test_target_type_falls_back_by_row_length() -> None:
    assert target_type(T.Q4_K, 512) is T.Q4_K
    assert target_type(T.Q4_K, 1408) is T.Q4_0
    assert target_type(T.Q5_K, 1408) is target_type(T.Q6_K, 96) is T.Q8_0
    assert target_type(T.Q8_0, 33) is target_type(T.Q4_K, 33) is None


SEARCHED = (T.Q2_K, T.Q3_K, T.IQ4_NL, T.IQ4_XS, T.MXFP4, *GRID_TYPES)
LLAMA_CPPS = (*SEARCHED, T.Q4_0, T.Q4_1, T.Q5_0, T.Q5_1, T.Q4_K, T.Q5_K, T.Q6_K)
WEIGHTED = (*LLAMA_CPPS, *IQK_WRITABLE)


def weighted_error(values: np.ndarray, blocks: np.ndarray, qtype: T, importance: np.ndarray | None) -> float:
    difference = decoded(blocks, qtype).astype(np.float64) - values
    return float((difference**2 * (1.0 if importance is None else importance)).sum())


def laplace(rows: int = 16, cols: int = 1024) -> np.ndarray:
    return np.random.default_rng(1).laplace(size=(rows, cols)).astype(np.float32) * np.float32(0.02)


def importances(cols: int) -> np.ndarray:
    """Mean squares of activations spread like this: over more than two orders of magnitude."""
    return np.exp(np.random.default_rng(2).standard_normal(cols)).astype(np.float32)


def best_of_table(values: np.ndarray, table: np.ndarray, scales: np.ndarray) -> float:
    """Brute force: the relative error of blocks of 32 whose scale is the best of `scales` times the largest value."""
    x = values.reshape(-1, 32).astype(np.float64)
    largest = np.abs(x).max(1, keepdims=True)
    best = np.full(len(x), np.inf)
    for scale in scales:
        grid = largest * scale * table
        error = (np.abs(x[:, :, None] - grid[:, None, :]).min(axis=2) ** 2).sum(1)
        best = np.minimum(best, error)
    return float(np.sqrt(best.sum() / (x**2).sum()))


def test_a_table_of_values_is_used_as_well_as_can_be() -> None:
    table = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.float64)
    steps = np.linspace(1 / 180, 1 / 80, 160)
    bound = best_of_table(weights(4), table, np.concatenate([steps, -steps]))
    assert relative_rms(weights(4), T.IQ4_NL) <= 1.02 * bound
    assert relative_rms(weights(4), T.IQ4_XS) <= 1.04 * bound  # a scale of six bits per 32 instead of fp16


def test_mxfp4_takes_the_power_of_two_that_errs_least() -> None:
    values = weights(4)
    x = values.reshape(-1, 32).astype(np.float64)
    table = np.array(gguf.quants.MXFP4.kvalues, dtype=np.float64) / 2
    errors = [(np.abs(x[:, :, None] - 2.0**power * table).min(axis=2) ** 2).sum(1) for power in range(-14, 2)]
    best = float(np.sqrt(np.min(errors, axis=0).sum() / (x**2).sum()))
    assert relative_rms(values, T.MXFP4) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(
    ("qtype", "other"),
    [(T.IQ4_KS, T.IQ4_XS), (T.IQ4_K, T.Q4_K), (T.IQ5_K, T.Q5_K), (T.IQ3_K, T.IQ3_S), (T.IQ4_K, T.IQ4_NL)],
)
def test_ik_llama_cpps_types_err_less_than_others_of_their_size(qtype: T, other: T) -> None:
    assert row_bytes(qtype, 1024) <= row_bytes(other, 1024) + 4
    for values in (weights(), laplace()):
        assert relative_rms(values, qtype) < relative_rms(values, other)


def best_of_two_tables(values: np.ndarray, qtype: T, scales: np.ndarray) -> float:
    """Brute force: the relative error where each sub-block has the best of `scales` times its largest value, and the
    better of both tables.
    """
    known = IQK_VALUES[qtype]
    x = values.reshape(-1, 256 // known.subs).astype(np.float64)
    largest, best = np.abs(x).max(1, keepdims=True), np.full(len(x), np.inf)
    for scale in scales:
        for table in (np.array(known.values), np.array(known.values) + known.shift):
            grid = largest * scale * table
            best = np.minimum(best, (np.abs(x[:, :, None] - grid[:, None, :]).min(axis=2) ** 2).sum(1))
    return float(np.sqrt(best.sum() / (x**2).sum()))


@pytest.mark.parametrize(("qtype", "slack"), [(T.IQ4_KS, 1.03), (T.IQ4_K, 1.04), (T.IQ3_K, 1.04), (T.IQ2_K, 1.13)])
def test_the_better_of_two_tables_is_found(qtype: T, slack: float) -> None:
    """The slack is what scales of 7, 6, 5 and 4 bits cost."""
    largest = max(abs(value) for value in IQK_VALUES[qtype].values)
    steps = np.linspace(0.7 / largest, 3.0 / largest, 160)
    bound = best_of_two_tables(weights(4), qtype, np.concatenate([steps, -steps]))
    assert relative_rms(weights(4), qtype) <= slack * bound


@pytest.mark.parametrize("qtype", WEIGHTED)
def test_columns_that_matter_err_less(qtype: T) -> None:
    """By their own measure weighted blocks are better than plain ones, and no better by the plain one."""
    values, importance = laplace(), importances(1024)
    plain, weighted = quantize(values, qtype), quantize(values, qtype, importance)
    assert weighted_error(values, weighted, qtype, importance) < weighted_error(values, plain, qtype, importance)
    assert (weighted == quantize(values, qtype, importance * 1024)).all()  # only their ratios count
    assert (quantize(values, qtype, np.zeros(1024, dtype=np.float32)) == plain).all()  # nothing was seen


def test_importances_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="shape \\[256\\]"):
        quantize(weights(2, 256), T.Q4_K, importances(128))


def by_llama_cpp(values: np.ndarray, qtype: T, importance: np.ndarray | None) -> np.ndarray:
    folder = library_folder()
    assert folder is not None
    call = ctypes.CDLL(str(folder / "libggml-base.so")).ggml_quantize_chunk
    call.restype = ctypes.c_size_t
    call.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    block, nbytes = GGML_QUANT_SIZES[qtype]
    rows, cols = values.shape
    out = np.empty((rows, cols // block * nbytes), dtype=np.uint8)
    given = None if importance is None else importance.ctypes.data
    call(int(qtype), values.ctypes.data, out.ctypes.data, 0, rows, cols, given)
    return out


@pytest.mark.skipif(library_folder() is None, reason="llama-cpp-python is not installed")
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("qtype", [*LLAMA_CPPS, T.Q8_0, T.TQ1_0, T.TQ2_0, T.Q1_0])
def test_errors_are_at_most_those_of_llama_cpp(qtype: T, is_weighted: bool) -> None:
    importance = importances(2048) if is_weighted else None
    if qtype in GRID_TYPES and importance is None:
        importance = np.ones(2048, dtype=np.float32)  # some of llama.cpp's quantizers do not go without
    for values in (weights(32, 2048), laplace(32, 2048)):
        ours, theirs = quantize(values, qtype, importance), by_llama_cpp(values, qtype, importance)
        got, wanted = (weighted_error(values, blocks, qtype, importance) for blocks in (ours, theirs))
        assert got <= wanted * (1 + 1e-6)
