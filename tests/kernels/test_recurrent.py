"""Recurrent kernels: the oracle against transformers, the kernels against the oracle, and equal bits over tiers,
threads, cuts of a prompt and what else is in a step."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.mamba.modeling_mamba import mamba_selective_state_update
from transformers.models.mamba2.modeling_mamba2 import mamba2_selective_state_update
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from ktransformers.kernels import reference_recurrent as reference
from ktransformers.kernels.cpu import recurrent
from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall, SelectiveScanCall
from ktransformers.kernels.types import StateStep

ROWS = 70
SLOTS = 6


def step_of(counts, read=None, write=None, saves=None, rows=None) -> StateStep:
    """Sequences of `counts` rows; saves: {row: slot}. Without slots: sequence s has slot s, and begins with zeros."""
    total = sum(counts) if rows is None else rows
    save_slots = [(saves or {}).get(row, -1) for row in range(total)]
    numbers = (
        [0, *itertools.accumulate(counts)],
        [-1] * len(counts) if read is None else read,
        range(len(counts)) if write is None else write,
        save_slots,
    )
    return StateStep(
        *(torch.tensor(list(n), dtype=torch.int32) for n in numbers), torch.zeros(total, dtype=torch.int32)
    )


@dataclass(frozen=True)
class Case:
    """A kernel and its oracle as functions of rows first .. end - 1, and the shape of a slot of its states."""

    native: Callable[..., Tensor]
    oracle: Callable[[Tensor, StateStep], Tensor]
    slot: tuple[int, ...]

    def states(self) -> Tensor:
        return torch.randn(SLOTS, *self.slot, generator=torch.Generator().manual_seed(9))


def _numbers(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def conv(channels, width, activation, has_bias):
    normal = _numbers(width)
    x, weight = normal(ROWS, channels + 5)[:, 2 : channels + 2], normal(channels, width)
    weight = weight.t().contiguous().t() if has_bias else weight
    bias = normal(channels) if has_bias else None
    return Case(
        lambda s, step, pool, rows=slice(None): recurrent.causal_conv(
            ConvCall(x[rows], weight, bias, s, step, activation), pool
        ),
        lambda s, step: reference.causal_conv(ConvCall(x, weight, bias, s, step, activation)),
        (width - 1, channels),
    )


def delta(key_heads, heads, dim_k, dim_v, per_key, eps):
    normal = _numbers(dim_k)
    q, k, v = normal(ROWS, key_heads, dim_k), normal(ROWS, key_heads, dim_k) / dim_k**0.5, normal(ROWS, heads, dim_v)
    decay = -normal(ROWS, heads, dim_k).abs() if per_key else -normal(ROWS, heads).abs()
    beta = torch.sigmoid(normal(ROWS, heads))
    arguments = (q, k, v, decay, beta)
    return Case(
        lambda s, step, pool, rows=slice(None): recurrent.scan_heads(
            ScanCall(*(x[rows] for x in arguments), s, step, eps, dim_k**-0.5), pool
        ),
        lambda s, step: reference.scan_heads(ScanCall(*arguments, s, step, eps, dim_k**-0.5)),
        (heads, dim_k, dim_v),
    )


def linear(key_heads, heads, dim_k, dim_v):
    normal = _numbers(dim_v)
    q, k, v = normal(ROWS, key_heads, dim_k), normal(ROWS, key_heads, dim_k), normal(ROWS, heads, dim_v)
    arguments = (q, k, v, -normal(ROWS, heads).abs())
    return Case(
        lambda s, step, pool, rows=slice(None): recurrent.scan_heads(
            ScanCall(*(x[rows] for x in arguments), None, s, step), pool
        ),
        lambda s, step: reference.scan_heads(ScanCall(*arguments, None, s, step)),
        (heads, dim_k, dim_v),
    )


def selective(channels, size, has_skip):
    normal = _numbers(size)
    x, dt, b, c = normal(ROWS, channels), normal(ROWS, channels).abs(), normal(ROWS, size), normal(ROWS, size)
    rates, skip = -normal(channels, size).abs(), normal(channels) if has_skip else None
    return Case(
        lambda s, step, pool, rows=slice(None): recurrent.selective_scan(
            SelectiveScanCall(x[rows], dt[rows], rates, b[rows], c[rows], skip, s, step), pool
        ),
        lambda s, step: reference.selective_scan(SelectiveScanCall(x, dt, rates, b, c, skip, s, step)),
        (channels, size),
    )


CASES = {
    "conv": conv(300, 4, "silu", False),
    "conv_bias": conv(37, 3, "none", True),
    "conv_widest": conv(16, 8, "silu", True),
    "delta": delta(2, 4, 128, 64, False, 1e-6),
    "delta_tails": delta(3, 3, 37, 41, False, None),
    "delta_keys": delta(2, 2, 24, 48, True, 1e-6),
    "linear": linear(2, 4, 16, 64),
    "linear_tails": linear(1, 3, 13, 21),
    "selective": selective(150, 16, True),
    "selective_tails": selective(9, 5, False),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@each_case
def test_against_the_oracle(case, pools):
    # A sequence from zeros, one from a slot to itself, one from a snapshot to elsewhere; an empty one; rows left over.
    step = step_of([33, 20, 0, 15], [-1, 1, -1, 2], [0, 1, -1, 3], {31: 4, 60: 5}, ROWS)
    states, want_states = case.states(), case.states().double()
    want = case.oracle(want_states, step)
    out = case.native(states, step, pools[0])
    # Sums of up to 128 products, fed back over up to 33 rows that forget: errors of a few hundred roundings.
    for got, exact in ((out, want), (states, want_states.float())):
        torch.testing.assert_close(got, exact, rtol=0, atol=2e-5 * float(exact.abs().max()))
    assert torch.equal(out[68:], torch.zeros_like(out[68:]))
    assert torch.equal(states[2], case.states()[2])
    for each in pools[1:]:
        again = case.states()
        assert torch.equal(case.native(again, step, each), out), each
        assert torch.equal(again, states), each


@each_case
@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_cuts_of_a_prompt_change_nothing(case, chunk, pools):
    whole_states, states = case.states(), case.states()
    whole = case.native(whole_states, step_of([ROWS], [-1], [0], {63: 4}), pools[0])
    pool, parts = pools[-1 - chunk % 3], []
    for first in range(0, ROWS, chunk):
        count = min(chunk, ROWS - first)
        saves = {63 - first: 4} if first <= 63 < first + count else {}
        step = step_of([count], [0 if first else -1], [0], saves)
        parts.append(case.native(states, step, pool, slice(first, first + count)))
    assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(states, whole_states)


@each_case
def test_neighbours_in_a_step_change_nothing(case, pool):
    states, alone = case.states(), case.states()
    counts, read, write = [1, 40, 1, 28], [0, -1, 2, 3], [0, 1, 4, 3]
    out = case.native(states, step_of(counts, read, write), pool)
    for i, (first, end) in enumerate(itertools.pairwise([0, *itertools.accumulate(counts)])):
        part = case.native(alone, step_of([end - first], [read[i]], [write[i]]), pool, slice(first, end))
        assert torch.equal(part, out[first:end]), i
    assert torch.equal(states, alone)


@each_case
def test_a_snapshot_is_what_a_run_continues_from(case, pool):
    states = case.states()
    whole = case.native(states, step_of([ROWS], [-1], [0], {39: 1}), pool)
    rest = case.native(states, step_of([ROWS - 40], [1], [2]), pool, slice(40, ROWS))
    assert torch.equal(rest, whole[40:])
    assert torch.equal(states[2], states[0])


@each_case
def test_states_that_end_at_a_page(case, pools, guarded):
    states = case.states()[:2].contiguous()
    ending = guarded.copy_to_end(states.reshape(-1).view(torch.uint8)).view(torch.float32).reshape(states.shape)
    step = step_of([ROWS], [1], [1])
    want = case.native(states, step, pools[0])
    for each in (pools[0], *pools[1::3]):
        ending.copy_(case.states()[:2])
        assert torch.equal(case.native(ending, step, each), want)
        assert torch.equal(ending, states)


def test_inputs_that_end_at_a_page(pools, guarded):
    def ending(*shape):
        x = torch.rand(*shape, generator=torch.Generator().manual_seed(1))
        return guarded.copy_to_end(x.reshape(-1).view(torch.uint8)).view(torch.float32).reshape(shape)

    step = step_of([3])
    q, k, v, decay, beta = (ending(3, *shape) for shape in ((1, 7), (1, 7), (1, 19), (1,), (1,)))
    x, dt, rates, b, c, skip = (ending(*shape) for shape in ((3, 17), (3, 17), (17, 3), (3, 3), (3, 3), (17,)))
    weight, gates = ending(17, 4), [ending(3, 1) for _ in range(4)]
    for each in pools[::3]:
        states = torch.zeros(1, 1, 7, 19)
        assert recurrent.scan_heads(ScanCall(q, k, v, decay, beta, states, step, 1e-6, 1.0), each).isfinite().all()
        assert recurrent.scan_heads(ScanCall(q, k, v, q, beta, states, step, None, 1.0), each).isfinite().all()
        assert recurrent.scan_heads(ScanCall(q, k, v, decay, None, states, step), each).isfinite().all()
        assert (
            recurrent.selective_scan(SelectiveScanCall(x, dt, rates, b, c, skip, torch.zeros(1, 17, 3), step), each)
            .isfinite()
            .all()
        )
        assert (
            recurrent.causal_conv(ConvCall(x, weight, skip, torch.zeros(1, 3, 17), step, "silu"), each).isfinite().all()
        )
        assert recurrent.gated_norm(GatedNormCall(v[:, 0], v[:, 0], v[0, 0], 1e-6), each).isfinite().all()
        assert recurrent.delta_gates(*gates[:2], gates[2][0], gates[3][0], each)[0].isfinite().all()


def test_a_decay_for_each_key_that_is_one_for_the_head(pool):
    case = delta(2, 4, 32, 32, False, 1e-6)
    normal = _numbers(3)
    q, k, v, decay = normal(5, 2, 32), normal(5, 2, 32), normal(5, 4, 32), -normal(5, 4).abs()
    outs = []
    for each in (decay, decay[:, :, None].expand(5, 4, 32).contiguous()):
        states = case.states()
        outs.append(
            (recurrent.scan_heads(ScanCall(q, k, v, each, decay.exp(), states, step_of([5]), 1e-6, 0.2), pool), states)
        )
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))


# ---- the oracle is what transformers computes ----


def test_delta_oracles_against_transformers():
    normal = _numbers(5)
    q, k, v, beta = normal(9, 2, 16), normal(9, 2, 16), normal(9, 4, 8), torch.rand(9, 4)
    decay, start = -normal(9, 4).abs(), normal(1, 4, 16, 8)
    states = torch.cat([start, torch.zeros_like(start)])
    out = reference.scan_heads(ScanCall(q, k, v, decay, beta, states, step_of([9], [0], [1]), 1e-6, 0.25))
    want, last = qwen3_next.torch_recurrent_gated_delta_rule(
        *(x[None] for x in (q, k, v, decay, beta)), start, True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(states[1:], last)
    keys, queries = (x.repeat_interleave(2, 1) for x in (k, q))
    decays = -normal(9, 4, 16).abs()
    out = reference.scan_heads(ScanCall(q, k, v, decays, beta, states, step_of([9], [0], [1]), 1e-6, 0.25))
    want, last = recurrent_kimi_delta_attention(
        *(x[None] for x in (queries, keys, v, decays, beta)), start, True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(out, want[0])
    torch.testing.assert_close(states[1:], last)


def test_mamba_oracles_against_transformers():
    normal = _numbers(6)
    x, dt, b, c = normal(1, 4, 8), normal(1, 4).abs(), normal(1, 2, 16), normal(1, 2, 16)
    rates, skip, state = -normal(4).abs(), normal(4), normal(1, 4, 8, 16)
    states = state.transpose(2, 3).contiguous()
    out = reference.scan_heads(ScanCall(c, b, x * dt[..., None], dt * rates, None, states, step_of([1], [0], [0])))
    want = mamba2_selective_state_update(
        state, x, dt[..., None].expand_as(x), rates[:, None, None], b, c, skip[:, None]
    )
    torch.testing.assert_close(out + skip[:, None] * x, want)
    torch.testing.assert_close(states.transpose(2, 3), state)

    x, dt, b, c = normal(1, 12), normal(1, 12).abs(), normal(1, 5), normal(1, 5)
    rates, skip, state = -normal(12, 5).abs(), normal(12), normal(1, 12, 5)
    states = state.clone()
    out = reference.selective_scan(SelectiveScanCall(x, dt, rates, b, c, skip, states, step_of([1], [0], [0])))
    torch.testing.assert_close(out, mamba_selective_state_update(state, x, dt, rates, b, c, skip))
    torch.testing.assert_close(states, state)


def test_conv_and_norm_oracles_against_transformers():
    normal = _numbers(7)
    x, weight, bias, states = normal(6, 10), normal(10, 4), normal(10), torch.zeros(1, 3, 10)
    out = reference.causal_conv(ConvCall(x, weight, bias, states, step_of([6]), "silu"))
    want = qwen3_next.causal_conv1d_fn(x.T[None], weight, bias, activation="silu")
    torch.testing.assert_close(out, want[0].T)
    x, gate = normal(6, 10), normal(6, 10)
    module = qwen3_next.Qwen3NextRMSNormGated(10, eps=1e-5)
    torch.nn.init.uniform_(module.weight)
    torch.testing.assert_close(reference.gated_norm(GatedNormCall(x, gate, module.weight, 1e-5)), module(x, gate))


# ---- what is done row by row ----


@pytest.mark.parametrize("size", [1, 40, 128])
@pytest.mark.parametrize("is_gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(size, is_gate_first, activation, pools):
    normal = _numbers(size)
    x, gate = normal(5, 3 * size), normal(5, 4 * size)[:, size:]
    options = {"group_size": size, "is_gate_first": is_gate_first, "activation": activation}
    for weight in (normal(size), normal(3 * size)):
        out = recurrent.gated_norm(GatedNormCall(x, gate, weight, 1e-6, **options), pools[0])
        torch.testing.assert_close(
            out, reference.gated_norm(GatedNormCall(x, gate, weight, 1e-6, **options)), rtol=1e-5, atol=1e-6
        )
        for each in pools[1:]:
            assert torch.equal(recurrent.gated_norm(GatedNormCall(x, gate, weight, 1e-6, **options), each), out)
        inplace = x.clone()
        assert (
            recurrent.gated_norm(GatedNormCall(inplace, gate, weight, 1e-6, **options), pools[-1], out=inplace)
            is inplace
        )
        assert torch.equal(inplace, out)
    with pytest.raises(ValueError, match=r"group_size must divide"):
        recurrent.gated_norm(GatedNormCall(x, gate, weight, 1e-6, group_size=2 * size), pools[0])


def test_delta_gates(pools):
    a = torch.cat([torch.linspace(-100, 100, 4001), torch.linspace(-0.01, 0.01, 101)])[:, None]
    rate, bias = torch.tensor([-1.7]), torch.tensor([0.0])
    decay, beta = recurrent.delta_gates(a, a, rate, bias, pools[0])
    want = reference.delta_gates(a, a, rate, bias)
    # softplus is within 3 ulp, and 0 below the least exponential; the product adds half an ulp.
    torch.testing.assert_close(decay, want[0], rtol=4 * 2.0**-23, atol=1e-37)
    torch.testing.assert_close(beta, want[1], rtol=4 * 2.0**-23, atol=1e-37)
    heads = a.reshape(2, -1)
    for each in pools:
        both = recurrent.delta_gates(
            heads, heads, rate.expand(heads.shape[1]).contiguous(), bias.expand(heads.shape[1]).contiguous(), each
        )
        assert torch.equal(both[0].reshape(-1, 1), decay)
        assert torch.equal(both[1].reshape(-1, 1), beta)


def test_not_a_number_stays_in_its_sequence(pools):
    case, normal = CASES["delta"], _numbers(2)
    q, k, v = normal(6, 2, 128), normal(6, 2, 128), normal(6, 4, 64)
    decay, beta, step = -normal(6, 4).abs(), torch.rand(6, 4), step_of([2, 4])
    run = lambda pool: recurrent.scan_heads(ScanCall(q, k, v, decay, beta, case.states(), step, 1e-6, 1.0), pool)  # noqa: E731
    clean = run(pools[0])
    v[1, 2, 5] = float("nan")
    for each in pools[::3]:
        out = run(each)
        assert bool(out[1, 2, 5].isnan())
        out[1, 2, 5] = clean[1, 2, 5]
        assert torch.equal(out, clean)


def test_nothing_to_do(pool):
    states = CASES["delta"].states()
    empty = [torch.empty(0, *shape) for shape in ((2, 128), (2, 128), (4, 64), (4,), (4,))]
    assert recurrent.scan_heads(ScanCall(*empty, states, step_of([]), 1e-6, 1.0), pool).shape == (0, 4, 64)
    no_rows = ConvCall(torch.empty(0, 4), torch.ones(4, 1), None, torch.zeros(1, 0, 4), step_of([]), "none")
    assert recurrent.causal_conv(no_rows, pool).shape == (0, 4)
    assert torch.equal(states, CASES["delta"].states())
    narrow = [torch.ones(2, *shape) for shape in ((1, 3), (1, 3), (1, 0), (1,), (1,))]
    assert recurrent.scan_heads(ScanCall(*narrow, torch.zeros(1, 1, 3, 0), step_of([2]), None, 1.0), pool).shape == (
        2,
        1,
        0,
    )


def test_steps_that_do_not_fit(pool):
    case = CASES["linear_tails"]

    def run(*arguments, rows=None):
        step = step_of(*arguments, rows=rows)
        case.native(case.states(), step, pool, slice(0, step.save_slots.shape[0]))

    with pytest.raises(ValueError, match=r"first_rows\[1\] is 4: .* pass the step's 3 rows"):
        run([4], rows=3)
    with pytest.raises(ValueError, match=r"first_rows\[2\] is 1: they must not descend"):
        run([2, -1, 2])
    with pytest.raises(ValueError, match=r"write_slots\[0\] is 6, but there are 6 slots"):
        run([2], [-1], [6])
    with pytest.raises(ValueError, match=r"read_slots\[0\] is -2"):
        run([2], [-2])
    with pytest.raises(ValueError, match=r"save_slots\[1\] is 7"):
        run([2], [-1], [0], {1: 7})
    with pytest.raises(ValueError, match=r"write_slots\[1\] is slot 0, which sequence 0 .* writes too"):
        run([2, 2], None, [0, 0])
    with pytest.raises(ValueError, match=r"save_slots\[3\] is slot 0, which sequence 0"):
        run([2, 2], None, None, {3: 0})
    with pytest.raises(ValueError, match=r"read_slots\[0\] is slot 1, which sequence 1 of the same step writes"):
        run([2, 2], [1, -1])


def test_bad_arguments_are_named(pool):
    step, states = step_of([2]), torch.zeros(1, 4, 8, 8)
    q, v, decay = torch.zeros(2, 2, 8), torch.zeros(2, 4, 8), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="4 value heads cannot share 3 key heads"):
        recurrent.scan_heads(ScanCall(torch.zeros(2, 3, 8), torch.zeros(2, 3, 8), v, decay, None, states, step), pool)
    with pytest.raises(ValueError, match="k must have shape"):
        recurrent.scan_heads(ScanCall(q, q[:1], v, decay, None, states, step), pool)
    with pytest.raises(ValueError, match="k must have shape"):
        recurrent.scan_heads(ScanCall(q, torch.zeros(2, 2, 9), v, decay, None, states, step), pool)
    with pytest.raises(ValueError, match="q must be contiguous"):
        recurrent.scan_heads(ScanCall(torch.zeros(2, 8, 2).transpose(1, 2), q, v, decay, None, states, step), pool)
    with pytest.raises(ValueError, match="states must have shape"):
        recurrent.scan_heads(ScanCall(q, q, v, decay, None, states[:, :3], step), pool)
    with pytest.raises(ValueError, match="save_slots must have shape"):
        recurrent.scan_heads(ScanCall(q, q, v, decay, None, states, step_of([3])), pool)
    with pytest.raises(TypeError, match=r"v must be torch\.float32"):
        recurrent.scan_heads(ScanCall(q, q, v.half(), decay, None, states, step), pool)
    with pytest.raises(ValueError, match="1 to 8 wide, got 9"):
        recurrent.causal_conv(ConvCall(v[:, 0], torch.zeros(8, 9), None, torch.zeros(1, 8, 8), step, "none"), pool)
    with pytest.raises(ValueError, match="activation must be"):
        recurrent.causal_conv(ConvCall(v[:, 0], torch.zeros(8, 2), None, torch.zeros(1, 1, 8), step, "gelu"), pool)
