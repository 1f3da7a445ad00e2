"""Recurrent layers' kernels against fp64, row by row: outputs, the states behind a step and those that it saves."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import softplus

from ktransformers.kernels.recurrent_call import ConvCall, GatedNormCall, ScanCall, SelectiveScanCall
from ktransformers.kernels.triton.common.compiling import watch_launches
from ktransformers.kernels.triton.recurrent import launch as recurrent
from ktransformers.kernels.triton.recurrent import mixers as recurrent_mixers
from ktransformers.kernels.types import StateStep
from tests.support.checks.launches import counted_launches
from tests.support.triton_kernels import recurrent_oracle as oracle
from tests.support.triton_kernels.comparing import normal
from tests.support.triton_kernels.recurrent_oracle import make_step

SLOTS = 6
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 8e-3}  # of the largest; a bf16 result is rounded to 2^-8


def near(out, want, dtype=torch.float32):
    """Within the tolerance of the largest value."""
    assert out.shape == want.shape
    worst = float((out.double().cpu() - want).abs().max())
    assert worst <= TOLERANCE[dtype] * float(want.abs().max())


def check(result, states, want, dtype=torch.float32):
    near(result, want[0], dtype)
    near(states, want[1])


STEPS = [
    pytest.param(([1], [5]), id="one row"),
    pytest.param(([1, 3, 0, 2], [9, 0, 0, 70]), id="few rows"),
]


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("width", "has_bias"), [(4, False), (3, True), (2, True), (8, False)])
@pytest.mark.parametrize("shape", [*STEPS, pytest.param(([2, 41, 33], [7, 0, 60]), id="many rows")])
def test_causal_conv(shape, width, has_bias, dtype, device):
    counts, starts = shape
    saves = [(0, 5)] if sum(counts) < 50 else [(2, 5), (22, 4), (46, 3)]
    step = make_step(counts, starts, saves=saves, tail=2, device=device)
    rows, channels = sum(counts) + 2, 72
    x = normal(rows, 90, dtype=dtype, device=device)[:, 10 : 10 + channels]
    weight, bias = normal(channels, width, device=device, seed=1), normal(channels, device=device, seed=2)
    states = normal(SLOTS, width - 1, channels, device=device, seed=3)
    activation = "silu" if has_bias else "none"
    want = oracle.conv(x, weight, bias if has_bias else None, states, step, activation)
    out = torch.empty(rows, channels, dtype=dtype, device=device)
    result = recurrent.causal_conv(ConvCall(x, weight, bias if has_bias else None, states, step, activation), out=out)
    assert result is out
    check(out, states, want, dtype)
    assert not bool(out[-2:].any())


def test_a_sequence_without_rows_leaves_its_slot_alone(device):
    step = replace(make_step([0, 2], [5, 5], device=device), write_slots=torch.tensor([0, 1]).int().to(device))
    step = replace(step, read_slots=torch.tensor([-1, 1]).int().to(device))
    conv, states = normal(2, 3, 24, device=device), normal(2, 1, 8, 8, device=device)
    before = conv[0].clone(), states[0].clone()
    q, k, v, decay, beta = scan_inputs(2, 1, 1, 8, 8, device=device)
    recurrent.causal_conv(ConvCall(normal(2, 24, device=device), normal(24, 4, device=device), None, conv, step))
    recurrent.scan_heads(ScanCall(q, k, v, decay, beta, states, step))
    assert torch.equal(conv[0], before[0])
    assert torch.equal(states[0], before[1])


def test_conv_reads_the_columns_that_it_is_told(device):
    step = make_step([3], [0], device=device)
    x, weight = normal(3, 20, device=device), normal(8, 4, device=device, seed=1)
    columns = torch.tensor([3, 2, 19, 0, 5, 5, 7, 11], dtype=torch.int32, device=device)
    states, same = (torch.zeros(SLOTS, 3, 8, device=device) for _ in range(2))
    out = recurrent.causal_conv(ConvCall(x, weight, None, states, step), columns=columns)
    assert torch.equal(out, recurrent.causal_conv(ConvCall(x[:, columns.long()], weight, None, same, step)))
    assert torch.equal(states, same)


def scan_inputs(rows, key_heads, heads, key_dim, value_dim, per_key=False, dtype=torch.float32, device="cpu", rate=0.3):
    """As layers have them: q, k, v are columns of one tensor; decays from nearly 1 to one that forgets at once."""
    mixed = normal(rows, 2 * key_heads * key_dim + heads * value_dim, dtype=dtype, device=device)
    q, k, v = mixed.split((key_heads * key_dim, key_heads * key_dim, heads * value_dim), 1)
    q, k = (each.unflatten(1, (key_heads, key_dim)) for each in (q, k))
    shape = (rows, heads, key_dim) if per_key else (rows, heads)
    decay = -rate * normal(*shape, seed=1).exp()
    if rows > 8:
        decay[rows // 2] = -60.0  # as large as it is, nothing overflows
    beta = torch.sigmoid(normal(rows, heads, seed=2))
    return q, k, v.unflatten(1, (heads, value_dim)), decay.to(device), beta.to(device)


@pytest.mark.parametrize("per_key", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("shape", STEPS)
def test_delta_scan_of_few_rows(shape, per_key, device):
    counts, starts = shape
    step = make_step(counts, starts, saves=[(0, 5)], tail=1, device=device, is_graph=True)
    inputs = scan_inputs(sum(counts) + 1, 2, 4, 24, 40, per_key, device=device)
    states = normal(SLOTS, 4, 24, 40, device=device, seed=5)
    want = oracle.scan(*inputs, states, step, 1e-6, 24**-0.5)
    out = recurrent.scan_heads(ScanCall(*inputs, states, step, 1e-6, 24**-0.5))
    check(out, states, want)
    assert not bool(out[-1:].any())


CHUNKED = [
    pytest.param(([40], [0], []), id="part of a chunk"),
    pytest.param(([1, 150, 70], [9, 30, 0], [(34, 5), (98, 4)]), id="chunks from the middle on"),
]


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("per_key", [False, True], ids=["gdn", "kda"])
@pytest.mark.parametrize("shape", CHUNKED)
def test_delta_scan_of_many_rows(shape, per_key, device):
    """Saved where chunks end: row 34 of the second sequence is position 63."""
    counts, starts, saves = shape
    step = make_step(counts, starts, saves=saves, tail=1, device=device)
    inputs = scan_inputs(sum(counts) + 1, 1, 2, 24, 20, per_key, device=device)
    states = normal(SLOTS, 2, 24, 20, device=device, seed=5)
    want = oracle.scan(*inputs, states, step, 1e-6, 24**-0.5)
    out = recurrent.scan_heads(ScanCall(*inputs, states, step, 1e-6, 24**-0.5))
    check(out, states, want)
    assert not bool(out[-1:].any())


@pytest.mark.parametrize("decay", [0.0, -1e-3, -5.0], ids=["none", "slow", "fast"])
@pytest.mark.parametrize("per_key", [False, True], ids=["gdn", "kda"])
def test_equal_keys_and_full_corrections(per_key, decay, device):
    """What a series of powers of L would lose: each row corrects the same direction, of which little is left."""
    rows, heads, width = 64, 1, 16
    q, k, v, shape, beta = scan_inputs(rows, 1, heads, width, width, per_key, device=device)
    k = k[:1].expand(rows, -1, -1) + 1e-3 * k
    inputs = (q, k.contiguous(), v, torch.full_like(shape, decay), torch.full_like(beta, 0.999))
    step = make_step([rows], [0], device=device)
    states = torch.zeros(1, heads, width, width, device=device)
    want = oracle.scan(*inputs, states, step, 1e-6, 0.25)
    check(recurrent.scan_heads(ScanCall(*inputs, states, step, 1e-6, 0.25)), states, want)


@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("shape", [STEPS[1].values[0] + ([(0, 5)],), CHUNKED[1].values[0]], ids=["few", "many"])
def test_linear_scan(shape, key_heads, device):
    counts, starts, saves = shape
    step = make_step(counts, starts, saves=saves, tail=1, device=device)
    q, k, v, decay, _ = scan_inputs(sum(counts) + 1, key_heads, 4, 16, 24, device=device)
    states = normal(SLOTS, 4, 16, 24, device=device, seed=5)
    want = oracle.scan(q, k, v, decay, None, states, step, None, 0.5)
    check(recurrent.scan_heads(ScanCall(q, k, v, decay, None, states, step, None, 0.5)), states, want)


def test_scans_take_bf16(device):
    step = make_step([3, 33], [0, 0], device=device)
    inputs = scan_inputs(36, 1, 1, 16, 16, dtype=torch.bfloat16, device=device)
    states = torch.zeros(2, 1, 16, 16, device=device)
    want = oracle.scan(*inputs, states, step, 1e-6, 0.25)
    out = recurrent.scan_heads(ScanCall(*inputs, states, step, 1e-6, 0.25))
    check(out, states, want)  # rounded nowhere
    rounded = torch.empty_like(out, dtype=torch.bfloat16)
    near(recurrent.scan_heads(ScanCall(*inputs, states, step, 1e-6, 0.25), out=rounded), want[0], torch.bfloat16)


@pytest.mark.parametrize("has_skip", [False, True])
@pytest.mark.parametrize("shape", STEPS)
def test_selective_scan(shape, has_skip, device):
    counts, starts = shape
    rows, channels, size = sum(counts) + 1, 70, 12
    step = make_step(counts, starts, saves=[(0, 5)], tail=1, device=device)
    x, skip = normal(rows, channels, device=device), normal(channels, device=device, seed=1) if has_skip else None
    dt, a = normal(rows, channels, seed=2).exp().to(device), -normal(channels, size, seed=3).exp().to(device)
    both = normal(rows, 2 * size, device=device, seed=4)
    states = normal(SLOTS, channels, size, device=device, seed=5)
    arguments = (x, dt, a, both[:, :size], both[:, size:], skip, states, step)
    want = oracle.selective(*arguments)
    out = recurrent.selective_scan(SelectiveScanCall(*arguments))
    check(out, states, want)
    assert not bool(out[-1:].any())


@pytest.mark.parametrize("is_gate_first", [False, True])
@pytest.mark.parametrize(("size", "activation"), [(24, "silu"), (96, "sigmoid"), (48, "none")])
def test_gated_norm(size, activation, is_gate_first, device):
    x, gate = normal(3, 96, device=device), normal(3, 200, device=device, seed=1)[:, 50:146]
    shared = activation == "silu"
    weight = normal(size if shared else 96, device=device, seed=2)
    options = {"group_size": size, "is_gate_first": is_gate_first, "activation": activation}
    want = oracle.gated_norm(x, gate, weight, 1e-5, size, is_gate_first, activation)
    out = recurrent.gated_norm(GatedNormCall(x, gate, weight, 1e-5, **options))
    near(out, want)
    if size == 24:
        split = gate.unflatten(1, (2, 2, size))
        assert torch.equal(recurrent.gated_norm(GatedNormCall(x, split, weight, 1e-5, **options)), out)
    assert recurrent.gated_norm(GatedNormCall(x, gate, weight, 1e-5, **options), out=x) is x
    assert torch.equal(x, out)


@pytest.mark.parametrize("cut", [64, 128])
def test_results_do_not_depend_on_cuts_between_chunks_or_on_neighbours(cut, device):
    """The same bits: a prompt whole, or cut at a multiple of 64 and with another sequence beside it."""
    rows, heads, width = 150, 2, 16
    inputs = scan_inputs(rows, 1, heads, width, width, device=device)
    whole, parts = (torch.zeros(SLOTS, heads, width, width, device=device) for _ in range(2))
    out = recurrent.scan_heads(ScanCall(*inputs, whole, make_step([rows], [0], device=device), 1e-6))
    before = [each[:cut] for each in inputs]
    first = recurrent.scan_heads(ScanCall(*before, parts, make_step([cut], [0], device=device), 1e-6))
    after = [torch.cat((each[cut:], each[:40])) for each in inputs]
    step = make_step([rows - cut, 40], [cut, 0], device=device)
    if rows - cut < recurrent.CHUNKED_ROWS:  # row by row then, which agrees to the tolerance only
        near(recurrent.scan_heads(ScanCall(*after, parts, step, 1e-6))[: rows - cut], out[cut:].double().cpu())
        return
    assert torch.equal(torch.cat((first, recurrent.scan_heads(ScanCall(*after, parts, step, 1e-6))[: rows - cut])), out)
    assert torch.equal(parts[0], whole[0])


def test_a_decoded_row_is_the_same_beside_a_prompt(device):
    inputs = scan_inputs(41, 1, 2, 16, 16, device=device)
    states = normal(SLOTS, 2, 16, 16, device=device, seed=5)
    alone, beside = states.clone(), states.clone()
    out = recurrent.scan_heads(
        ScanCall(*(each[:1] for each in inputs), alone, make_step([1], [9], device=device), 1e-6)
    )
    both = recurrent.scan_heads(ScanCall(*inputs, beside, make_step([1, 40], [9, 0], device=device), 1e-6))
    assert torch.equal(both[:1], out)
    assert torch.equal(beside[0], alone[0])


def delta_net(is_interleaved, per_key, device, heads=4, key_heads=2, key_dim=16, value_dim=24):
    keys, values = key_heads * key_dim, heads * value_dim
    group = heads // key_heads
    weights = {
        "conv_weight": normal(2 * keys + values, 4, device=device, seed=1),
        "rate": -normal(heads, device=device, seed=2).exp(),
        "bias": normal(*((heads, key_dim) if per_key else (heads,)), device=device, seed=3),
        "norm_weight": normal(value_dim, device=device, seed=4),
    }
    columns = None
    if is_interleaved:  # per key head: q, k, the values and the gates of its value heads
        of_head = 2 * key_dim + 2 * group * value_dim
        starts = torch.arange(key_heads)[:, None] * of_head
        q = starts + torch.arange(key_dim)
        v = starts + 2 * key_dim + torch.arange(group * value_dim)
        columns = torch.cat((q.flatten(), q.flatten() + key_dim, v.flatten())).to(torch.int32).to(device)
        made = recurrent_mixers.interleaved_columns(key_heads, heads, key_dim, value_dim)
        assert torch.equal(made.to(device), columns)
    return recurrent_mixers.DeltaNet(
        key_heads, heads, key_dim, value_dim, norm_eps=1e-6, columns=columns,
        gate="sigmoid" if per_key else "silu", **weights,
    )  # fmt: skip


def net_oracle(x, gate, a, b, net, states, step):
    mixed, conv_states = oracle.conv(x, net.conv_weight, net.conv_bias, states[0], step, "silu")
    q, k, v = net.split(mixed)
    a, b, rate, bias = oracle.wide(a, b, net.rate, net.bias)
    rows, heads = len(x), net.num_value_heads
    decay = (rate[:, None] if bias.dim() == 2 else rate) * softplus(a.reshape(rows, *bias.shape) + bias)
    beta = torch.sigmoid(b.reshape(rows, heads))
    out, scan_states = oracle.scan(q, k, v, decay, beta, states[1], step, net.l2norm_eps, net.key_dim**-0.5)
    gate = gate.reshape(rows, -1)
    out = oracle.gated_norm(out.flatten(1), gate, net.norm_weight, net.norm_eps, net.value_dim, False, net.gate)
    return out, conv_states, scan_states


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["interleaved", "separate", "per key"])
@pytest.mark.parametrize("shape", [([1, 0, 3], [5, 0, 0]), ([2, 70], [5, 0])], ids=["few", "many"])
def test_gated_delta_net(shape, kind, device):
    counts, starts = shape
    net = delta_net(kind == "interleaved", kind == "per key", device)
    rows, group, width = sum(counts), 2, net.value_dim
    if kind == "interleaved":
        x = normal(rows, 2, 2 * 16 + 2 * group * width, device=device)
        gate = x[..., 32 + group * width :].unflatten(2, (group, width))
        both = normal(rows, 2, 2 * group, device=device, seed=6)
        x, b, a = x.flatten(1), both[..., :group], both[..., group:]
    else:
        x = normal(rows, 64 + 4 * width, device=device)
        gate = normal(rows, 2, group, width, device=device, seed=5)
        b, a = normal(rows, 2, group, device=device, seed=6), normal(rows, 2, group, device=device, seed=7)
        if kind == "per key":
            a = normal(rows, 4, 16, device=device, seed=7)
    step = make_step(counts, starts, device=device)
    states = normal(SLOTS, 3, 64 + 4 * width, device=device, seed=8), normal(SLOTS, 4, 16, width, device=device, seed=9)
    source = x if net.columns is None else x[:, net.columns.long()]
    want = net_oracle(source, gate, a, b, net, states, step)
    out = recurrent_mixers.gated_delta_net(x, gate, a, b, net, states, step)
    near(out, want[0])
    for state, wanted in zip(states, want[1:], strict=True):
        near(state, wanted)


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("shape", [([1, 0, 3], [5, 0, 0]), ([2, 70], [5, 20])], ids=["few", "many"])
def test_ssd_scan(shape, groups, device):
    """Mamba-2: limits of dt matter for some rows."""
    step = make_step(*shape, saves=[(0, 5)], tail=1, device=device)
    rows, heads, size, width = sum(shape[0]) + 1, 4, 16, 24
    x, dt = normal(rows, heads, width, device=device), normal(rows, heads + 3, device=device, seed=1)[:, 3:]
    b, c = normal(rows, groups, 2 * size, device=device, seed=2).split(size, 2)
    rate, bias, skip = (normal(heads, device=device, seed=seed) for seed in (3, 4, 5))
    states = normal(SLOTS, heads, size, width, device=device, seed=6)
    limits = (0.2, 1.5)
    wide_x, wide_dt, wide_bias, wide_skip = oracle.wide(x, dt, bias, skip)
    steps = softplus(wide_dt + wide_bias).clamp(*limits)
    decay = -rate.double().cpu().exp() * steps
    out, behind = oracle.scan(c, b, steps[..., None] * wide_x, decay, None, states, step)
    out[:-1] += (wide_skip[:, None] * wide_x)[:-1]
    weights = (-rate.exp(), bias, skip)
    call = ScanCall(c, b, x, dt, None, states, step)
    check(recurrent_mixers.ssd_scan(call, weights, limits), states, (out, behind))


def test_launches_of_a_decode_step(device, monkeypatch):
    """Two for all between the projections, whatever the layout of what they give."""
    step = make_step([1, 1], [5, 9], device=device, is_graph=True)
    for is_interleaved in (False, True):
        net = delta_net(is_interleaved, False, device)
        x, gates = normal(2, 2 * (32 + 96), device=device), normal(2, 2, 4, device=device)
        gate = x.unflatten(1, (2, -1))[..., 80:].unflatten(2, (2, 24))
        states = torch.zeros(SLOTS, 3, 160, device=device), torch.zeros(SLOTS, 4, 16, 24, device=device)
        with counted_launches(monkeypatch) as counts:
            source = x if is_interleaved else x[:, :160]
            recurrent_mixers.gated_delta_net(source, gate, gates[..., :2], gates[..., 2:], net, states, step)
        assert counts == {"conv_kernel": 1, "rows_kernel": 1}


@pytest.mark.exhaustive
def test_steps_of_other_sequences_need_no_other_kernels(device):
    """What is compiled before serving serves any number of rows and sequences, wherever a step's tensors lie."""
    net, met = delta_net(False, False, device), []
    for counts, is_graph in (([1], True), ([1] * 4, True), ([33], False), ([3, 34], False)):
        rows = sum(counts)
        step = make_step(counts, [0] * len(counts), device=device, is_graph=is_graph)
        parts = (step.first_rows, step.read_slots, step.write_slots, step.save_slots, step.kv_lens)
        moved = [torch.cat((part[:1], part))[1:] for part in parts]  # not at a multiple of 16 bytes
        x, gate = normal(rows, 160, device=device), normal(rows, 2, 2, 24, device=device)
        b = normal(rows, 2, 2, device=device)
        states = torch.zeros(16, 3, 160, device=device), torch.zeros(16, 4, 16, 24, device=device)
        for each in (step, StateStep(*moved, step.max_rows)):
            found = set()
            with watch_launches(found.add):
                recurrent_mixers.gated_delta_net(x, gate, b, b, net, states, each)
            met.append(found)
    assert len(met[0]) == 2
    assert met[0] == met[1] == met[2] == met[3]
    assert met[4] == met[5] == met[6] == met[7]


@pytest.mark.parametrize("is_delta", [False, True])
def test_workspace(is_delta, device, monkeypatch):
    step = make_step([40], [0], device=device)
    q, k, v, decay, beta = scan_inputs(40, 1, 2, 16, 24, device=device)
    states, out = torch.zeros(1, 2, 16, 24, device=device), torch.empty(40, 2, 24, device=device)
    made, original = [], torch.Tensor.new_empty

    def new_empty(*args, **kwargs):
        result = original(*args, **kwargs)
        if "dtype" in kwargs:  # the interpreter makes copies of its own
            made.append(result)
        return result

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    if is_delta:
        recurrent.scan_heads(ScanCall(q, k, v, decay, beta, states, step), out=out)
    else:
        recurrent.scan_heads(ScanCall(q, k, v, decay, None, states, step), out=out)
    assert recurrent.workspace_nbytes(40, 2, 16, 24, is_delta=is_delta) == sum(each.nbytes for each in made)


def test_bad_arguments_are_named(device):
    step = make_step([2], [0], device=device)
    x, weight, states = normal(2, 8, device=device), normal(8, 4, device=device), torch.zeros(2, 3, 8, device=device)
    with pytest.raises(ValueError, match="x must have shape"):
        recurrent.causal_conv(ConvCall(x[:, :7], weight, None, states, step))
    with pytest.raises(ValueError, match="2 to 8 columns"):
        recurrent.causal_conv(ConvCall(x, normal(8, 9, device=device), None, states, step))
    with pytest.raises(ValueError, match="activation must be one of"):
        recurrent.causal_conv(ConvCall(x, weight, None, states, step, "gelu"))
    with pytest.raises(TypeError, match="states must be fp32"):
        recurrent.causal_conv(ConvCall(x, weight, None, states.half(), step))
    with pytest.raises(ValueError, match="states must have shape"):
        recurrent.causal_conv(ConvCall(x, weight, None, states[:, :2], step))
    with pytest.raises(ValueError, match=r"step\.save_slots must be contiguous with shape \[1\]"):
        recurrent.causal_conv(ConvCall(x[:1], weight, None, states, step))
    wrong = StateStep(step.first_rows.long(), step.read_slots, step.write_slots, step.save_slots, step.kv_lens, 2)
    with pytest.raises(TypeError, match=r"step\.first_rows must be int32"):
        recurrent.causal_conv(ConvCall(x, weight, None, states, wrong))
    q, k, v, decay, beta = scan_inputs(2, 2, 3, 8, 8, device=device)
    with pytest.raises(ValueError, match="3 value heads cannot share 2 key heads"):
        recurrent.scan_heads(ScanCall(q, k, v, decay, beta, torch.zeros(2, 3, 8, 8, device=device), step))
