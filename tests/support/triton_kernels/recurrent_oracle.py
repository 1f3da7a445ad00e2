"""Recurrent layers in fp64, one row after the other: what the kernels' results are compared with."""

from __future__ import annotations

import torch
from torch.nn import functional

from ktransformers.kernels.types import StateStep


def make_step(counts, starts, *, saves=(), first_slot=0, tail=0, device="cpu", is_graph=False):
    """Sequences of counts[s] rows from position starts[s] on, which continue slot s, or begin at position 0.

    saves: (row, slot). tail: rows behind them without a token.
    """
    ends = torch.tensor([0, *counts]).cumsum(0)
    rows = int(ends[-1]) + tail
    slots = torch.arange(len(counts)) + first_slot
    saved, lens = torch.full((rows,), -1), torch.zeros(rows)
    for row, slot in saves:
        saved[row] = slot
    for first, count, start in zip(ends.tolist(), counts, starts, strict=False):
        lens[first : first + count] = torch.arange(start, start + count) + 1
    read = torch.where(torch.tensor(starts) > 0, slots, -1)
    write = torch.where(torch.tensor(counts) > 0, slots, -1)
    tensors = [each.to(torch.int32).to(device) for each in (ends, read, write, saved, lens)]
    return StateStep(*tensors, None if is_graph else max(counts))


def walk(step, states, advance):
    """advance(state, row) -> (state, out) over all rows; (outs by row, states behind)."""
    before, after, outs = states.double().cpu(), states.double().cpu().clone(), {}
    firsts, read, write, saves = (
        each.tolist() for each in (step.first_rows, step.read_slots, step.write_slots, step.save_slots)
    )
    for seq, slot in enumerate(read):
        state = before[slot].clone() if slot >= 0 else torch.zeros_like(before[0])
        for row in range(firsts[seq], firsts[seq + 1]):
            state, outs[row] = advance(state, row)
            if saves[row] >= 0:
                after[saves[row]] = state
        if write[seq] >= 0:
            after[write[seq]] = state
    some = next(iter(outs.values()))
    rows = [outs.get(row, torch.zeros_like(some)) for row in range(len(saves))]
    return torch.stack(rows), after


def wide(*tensors):
    return tuple(None if each is None else each.double().cpu() for each in tensors)


def conv(x, weight, bias, states, step, activation):
    x, weight, bias = wide(x, weight, bias)

    def advance(state, row):
        inputs = torch.cat((state, x[row][None]))
        out = (inputs * weight.T).sum(0) + (0 if bias is None else bias)
        return inputs[1:], functional.silu(out) if activation == "silu" else out

    return walk(step, states, advance)


def scan(q, k, v, decay, beta, states, step, eps=None, scale=1.0):
    """The gated delta rule; linear attention without beta."""
    group = v.shape[1] // q.shape[1]
    q, k, v, decay, beta = wide(q, k, v, decay, beta)
    if eps is not None:
        q, k = (each / (each.pow(2).sum(-1, keepdim=True) + eps).sqrt() for each in (q, k))
    q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)

    def advance(state, row):
        factor = decay[row].exp()
        state = state * (factor[:, :, None] if factor.dim() == 2 else factor[:, None, None])
        value = v[row]
        if beta is not None:
            value = (value - torch.einsum("hkv,hk->hv", state, k[row])) * beta[row][:, None]
        state = state + k[row][:, :, None] * value[:, None, :]
        return state, scale * torch.einsum("hkv,hk->hv", state, q[row])

    return walk(step, states, advance)


def selective(x, dt, a, b, c, skip, states, step):
    x, dt, a, b, c, skip = wide(x, dt, a, b, c, skip)

    def advance(state, row):
        state = torch.exp(dt[row][:, None] * a) * state + (dt[row] * x[row])[:, None] * b[row]
        return state, state @ c[row] + (0 if skip is None else skip * x[row])

    return walk(step, states, advance)


def gated_norm(x, gate, weight, eps, size, is_gate_first, activation):
    x, gate, weight = wide(x, gate, weight)
    factor = {"silu": functional.silu, "sigmoid": torch.sigmoid, "none": lambda x: x}[activation](gate)
    x = x * factor if is_gate_first else x
    groups = x.unflatten(1, (-1, size))
    groups = groups / (groups.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    x = groups.flatten(1) * (weight if weight.numel() == x.shape[1] else weight.repeat(x.shape[1] // size))
    return x if is_gate_first else x * factor
