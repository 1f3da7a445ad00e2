"""Launches of recurrent layers in real shapes, for compile_launches."""

from __future__ import annotations

import torch

from ktransformers.kernels.recurrent_call import ScanCall, SelectiveScanCall
from ktransformers.kernels.triton.recurrent import launch as recurrent
from ktransformers.kernels.triton.recurrent import mixers as recurrent_mixers
from ktransformers.kernels.types import StateStep


def state_step(rows, is_graph=False):
    """One sequence."""
    ids = torch.zeros(1, dtype=torch.int32)
    of_rows = torch.zeros(rows, dtype=torch.int32)
    return StateStep(torch.zeros(2, dtype=torch.int32), ids, ids, of_rows, of_rows, None if is_graph else rows)


def call_delta_net(rows, key_heads, heads, key_dim, value_dim, per_key=False):
    channels, group = 2 * key_heads * key_dim + heads * value_dim, heads // key_heads
    bias, norm = torch.zeros(heads, key_dim) if per_key else torch.zeros(heads), torch.zeros(value_dim)
    gate = torch.zeros(rows, key_heads, group, value_dim, dtype=torch.bfloat16)
    net = recurrent_mixers.DeltaNet(
        key_heads, heads, key_dim, value_dim, torch.zeros(channels, 4), torch.zeros(heads), bias, norm, 1e-6,
        gate="sigmoid" if per_key else "silu",
    )  # fmt: skip
    x, b = torch.zeros(rows, channels, dtype=torch.bfloat16), gate.new_zeros(rows, key_heads, group)
    a = gate.new_zeros(rows, heads, key_dim) if per_key else b
    states = torch.zeros(2, 3, channels), torch.zeros(2, heads, key_dim, value_dim)
    recurrent_mixers.gated_delta_net(x, gate, a, b, net, states, state_step(rows))


def call_linear_scan(rows, groups, heads, key_dim, value_dim):
    q = torch.zeros(rows, groups, key_dim, dtype=torch.bfloat16)
    v, states = torch.zeros(rows, heads, value_dim), torch.zeros(2, heads, key_dim, value_dim)
    recurrent.scan_heads(ScanCall(q, q, v, torch.zeros(rows, heads), None, states, state_step(rows)))


def call_ssd(rows, groups, heads, size, width):
    x, dt = torch.zeros(rows, heads, width, dtype=torch.bfloat16), torch.zeros(rows, heads, dtype=torch.bfloat16)
    b, states, small = x.new_zeros(rows, groups, size), torch.zeros(2, heads, size, width), torch.zeros(heads)
    recurrent_mixers.ssd_scan(ScanCall(b, b, x, dt, None, states, state_step(rows)), (small, small, small))


def call_selective(rows, channels, size):
    x, b, skip = torch.zeros(rows, channels, dtype=torch.bfloat16), torch.zeros(rows, size), torch.zeros(channels)
    states, step = torch.zeros(2, channels, size), state_step(rows)
    recurrent.selective_scan(SelectiveScanCall(x, x, torch.zeros(channels, size), b, b, skip, states, step))


def all_recurrent():
    """Qwen3-Next, Kimi Linear, MiniMax, Nemotron-H, Falcon-H1, Jamba."""
    for rows in (1, 4096):
        call_delta_net(rows, 16, 32, 128, 128)
        call_delta_net(rows, 32, 32, 128, 128, per_key=True)
        call_linear_scan(rows, 64, 64, 128, 128)
        call_ssd(rows, 8, 128, 128, 64)
        call_ssd(rows, 1, 24, 256, 64)
        call_selective(rows, 8192, 16)
