"""Attention in int8 or FP8 in prefill steps on the GPU, against fp64 over what the codes stand for."""

from __future__ import annotations

import pytest
import torch

from ktransformers.kernels import reference
from ktransformers.kernels.triton.attention import paged
from ktransformers.kernels.triton.attention.kv_codes import why_no_quantized_attention
from tests.kernels.triton.attention.test_attention import DECODE, OPTIONS, PREFILL, TOLERANCE, case, with_sinks
from tests.kernels.triton.attention.test_kv_codes import CODES, coded
from tests.support.checks.flat_calls import flat_attention
from tests.support.checks.products import product

attention = flat_attention(paged.attention)
oracle_attention = flat_attention(reference.attention)

EACH = pytest.mark.parametrize("dtype", CODES, ids=str)


class Attended:
    """Attention in int8 or FP8, and what it is compared with."""

    def __init__(self, arguments, dtype, device, scale, **options):
        q, k, v, *places = arguments
        self.scale, self.q, self.places, self.options = scale, q, places, options
        self.k, self.k_scales, self.k_numbers = coded(k, dtype, device)
        self.v, self.v_scales, self.v_numbers = coded(v, dtype, device)
        _, _, self.q_numbers = coded(q, dtype, device)
        self.device, self.dtype = device, dtype

    def result(self, **changes):
        given = {"scales": (self.k_scales, self.v_scales), "quantized_attention": True, **self.options, **changes}
        return attention(self.q, self.k, self.v, *self.places, self.scale, **given)

    def expected(self, q):
        cpu = [x.cpu() if isinstance(x, torch.Tensor) else x for x in self.places]
        options = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in self.options.items()}
        return oracle_attention(q.float().cpu(), self.k_numbers, self.v_numbers, *cpu, self.scale, **options)

    def check(self):
        """Queries are rounded as the oracle rounds keys; the rest is as without.

        Tensor cores add products of e4m3 with some 13 bits below the largest: four such errors of a logit of up to 4.
        """
        kind = self.q.dtype
        tolerance = TOLERANCE[kind] + (2e-3 if self.device.type == "cuda" and self.dtype != torch.int8 else 0.0)
        got = self.result().float().cpu()
        torch.testing.assert_close(got, self.expected(self.q_numbers), rtol=tolerance, atol=tolerance)


@product(strength=1, dtype=CODES, options=OPTIONS)
def test_options(options, dtype, device):
    arguments = case(PREFILL, 6, 2, 32, 64, torch.float32, device)
    Attended(arguments, dtype, device, 0.2, **with_sinks(options, 6, device)).check()


@product(
    strength=1, dtype=CODES, shape=[(4, 1, 64, 32), (2, 2, 128, 128), (3, 1, 32, 64), (2, 1, 16, 16)], page=[16, 3]
)
def test_widths_and_pages_in_bf16(shape, page, dtype, device):
    """Values of other widths than keys, and fewer columns than products of codes take."""
    heads, kv_heads, dim_k, dim_v = shape
    arguments = case(PREFILL, heads, kv_heads, dim_k, dim_v, torch.bfloat16, device, page)
    Attended(arguments, dtype, device, dim_k**-0.5).check()


@EACH
def test_what_rounding_queries_costs(dtype, device):
    """Against queries as they are.

    A logit is off by at most delta = scale * sum |q - q'| |k|, so probabilities by factors within exp(+-2 delta), and a
    result, whatever the values' mean is called, by (exp(2 delta) - 1) times the mean distance of the values from it.
    """
    made = Attended(case(PREFILL[:25], 2, 1, 32, 32, torch.float32, device), dtype, device, 0.2)
    exact, got = made.expected(made.q), made.result().cpu()
    q, rounded, used = made.q.cpu(), made.q_numbers, made.k_numbers[:, 0]
    delta = 0.2 * ((q - rounded).abs() @ used.abs().T).amax(-1)  # [T, heads], over all slots
    table, lens, values = made.places[0].cpu(), made.places[3].cpu(), made.v_numbers[:, 0]
    positions = torch.arange(int(lens.max()))
    slots = table[0, positions // 16].long() * 16 + positions % 16
    for row, length in enumerate(lens.tolist()):
        keys = used[slots[:length]]
        weights = torch.softmax(0.2 * q[row] @ keys.T, -1)
        spread = torch.einsum("hl,lhd->hd", weights, (values[slots[:length], None] - exact[row]).abs())
        bound = torch.expm1(2 * delta[row])[:, None] * spread + 2e-5
        assert bool(((got[row] - exact[row]).abs() <= bound).all())
    assert (got - exact).abs().max() > 1e-3  # they are rounded


@pytest.mark.exhaustive
@EACH
def test_queries_of_any_size(dtype, device):
    """Zeros attend to all positions alike, also behind masks; what is no number stays in its row and head."""
    q, *others = case(PREFILL, 4, 2, 32, 32, torch.float32, device)
    plain = Attended((q, *others), dtype, device, 0.2, window=50).result()
    q = q.clone()
    q[3, 1], q[4, 2] = 0.0, q[4, 2] * 2.0**-130
    q[5, 0, 7], q[6, 3, 0] = float("inf"), float("nan")
    got = Attended((q, *others), dtype, device, 0.2, window=50)
    result, touched = got.result(), torch.zeros(len(PREFILL), 4, dtype=torch.bool)
    for row, head in ((3, 1), (4, 2), (5, 0), (6, 3)):
        touched[row, head] = True
    assert torch.equal(result[~touched], plain[~touched])
    assert bool(result[5, 0].isnan().all() and result[6, 3].isnan().all())
    want = got.expected(torch.zeros_like(q))
    for row, head in ((3, 1), (4, 2)):
        torch.testing.assert_close(result[row, head].cpu(), want[row, head], rtol=2e-5, atol=2e-5)


@EACH
def test_slots_that_no_row_sees_and_the_same_step_again(dtype, device):
    made = Attended(case(PREFILL, 2, 1, 32, 32, torch.float32, device), dtype, device, 0.2)
    table, page, seqs, lens = made.places
    clean = made.result()
    assert torch.equal(made.result(), clean)
    used = torch.zeros(made.k.shape[0], dtype=torch.bool)
    for seq, length in zip(seqs.tolist(), lens.tolist(), strict=True):
        for position in range(length):
            used[table[seq, position // page] * page + position % page] = True
    made.k_scales[~used], made.v_scales[~used] = float("nan"), float("nan")
    assert torch.equal(made.result(), clean)


@EACH
def test_decode_is_as_without(dtype, device):
    made = Attended(case(DECODE, 4, 2, 32, 32, torch.float32, device), dtype, device, 0.2)
    assert torch.equal(made.result(), made.result(quantized_attention=False))


def test_bad_arguments_are_named(device):
    arguments = case(PREFILL, 4, 2, 32, 32, torch.float32, device)
    with pytest.raises(
        ValueError, match=r"quantized_attention goes with codes of keys and values, not with a cache of"
    ):
        attention(*arguments, 0.2, quantized_attention=True)
    made = Attended(arguments, torch.int8, device, 0.0)
    with pytest.raises(ValueError, match=r"scale 0.0 must be above 0"):
        made.result()


def test_where_there_are_products_of_codes(monkeypatch):
    gpu, cpu = torch.device("cuda:0"), torch.device("cpu")
    assert why_no_quantized_attention(torch.int8, cpu, (64, 64)) is None
    assert (
        why_no_quantized_attention(torch.int8, cpu, (64, 96))
        == "heads of 64 and 96 columns, which are no powers of two"
    )
    assert why_no_quantized_attention(torch.bfloat16, cpu, (64, 64)) == "keys are kept in bfloat16, not in codes"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert why_no_quantized_attention(torch.int8, gpu, (64, 64)) is None
    why = why_no_quantized_attention(torch.float8_e4m3fn, gpu, (64, 64))
    assert why == "products of e4m3 want compute capability 8.9, and this GPU has 8.6"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert why_no_quantized_attention(torch.float8_e4m3fn, gpu, (64, 64)) is None
