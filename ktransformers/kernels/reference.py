"""Oracles of the native kernels, slowly, in plain torch: weights dequantized by `gguf`, fp32 matmul, softmax.

Kernels are held to it within a tolerance; `int8_arithmetic.py` has the exact one. Knows nothing of the
extension, threads or tiers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor

from ktransformers.kernels.attention_call import AttentionCall, RowPages, TopkCall
from ktransformers.kernels.blocks import decode_blocks
from ktransformers.kernels.types import FP8_BLOCK, Fp8Matrix, GroupType, QuantType, RawTensor, block_size

__all__ = [
    "attention",
    "dequantize",
    "group_parts",
    "linear",
    "moe",
    "quantize_kv",
    "rms_norm",
    "select_topk_positions",
]


def dequantize(weight: RawTensor | Fp8Matrix) -> Tensor:
    """Return a weight as fp32, shape `weight.shape`, through `decode_blocks`, or torch's own FP8 type."""
    if isinstance(weight, Fp8Matrix):
        scales = weight.scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        return weight.values.view(torch.float8_e4m3fn).float() * scales[: weight.shape[0], : weight.shape[1]]
    if weight.qtype == QuantType.F32:
        return weight.data.clone().view(torch.float32).reshape(weight.shape)
    if weight.qtype == QuantType.F16:
        return weight.data.clone().view(torch.float16).float().reshape(weight.shape)
    if weight.qtype == QuantType.BF16:
        return weight.data.clone().view(torch.bfloat16).float().reshape(weight.shape)
    if isinstance(weight.qtype, GroupType):
        values, scales = group_parts(weight)
        return values * scales
    rows = weight.data.numpy().reshape(weight.rows, weight.row_bytes)
    return torch.from_numpy(decode_blocks(rows, weight.qtype)).reshape(weight.shape)


_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
_TWICE_E2M1 = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def group_parts(weight: RawTensor) -> tuple[Tensor, Tensor]:
    """Split blocks of a GroupType [N, K] into (values less zero points, scales), whose products are the weights: fp32
    [N, K].

    Values of E2M1 are twice what the format says, and its scales half.
    """
    qtype, (rows, cols) = weight.qtype, weight.shape
    size = block_size(qtype)
    blocks = weight.data.clone().view(rows * cols // size, -1)
    if qtype.name == "NVFP4_F32":
        scales = blocks[:, 4:6].contiguous().view(torch.float8_e4m3fn).float() * blocks[:, :4].contiguous().view(
            torch.float32
        )
        values = _TWICE_E2M1[torch.cat((blocks[:, 6:] & 15, blocks[:, 6:] >> 4), dim=1).int()]
        return values.float().view(rows, cols), (scales / 2).repeat_interleave(16, dim=1).view(rows, cols)
    dtype = torch.float8_e8m0fnu if qtype.name == "MXFP8" else _SCALES[qtype.name.split("_")[2]]
    has_zero, at = qtype.name.endswith("_Z"), dtype.itemsize
    scales = blocks[:, :at].contiguous().view(dtype).float().expand(-1, size).reshape(rows, cols)
    body = blocks[:, at + has_zero :].contiguous()
    if qtype.name.startswith("I4"):
        some = body.view(len(blocks), -1, 16)
        values = torch.stack((some & 15, some >> 4), dim=2).view(len(blocks), size).float() - 8
    else:
        values = body.view(torch.int8 if qtype.name.startswith("I8") else torch.float8_e4m3fn).float()
    if has_zero:
        values -= blocks[:, at : at + 1].contiguous().view(torch.int8).float()
    return values.view(rows, cols), scales


def linear(x: Tensor, weight: RawTensor | Fp8Matrix, bias: Tensor | None = None) -> Tensor:
    """Multiply x [T, K] with weight [N, K] and add bias [N] -> [T, N], accumulated in fp64."""
    result = x.double() @ dequantize(weight).double().T
    return (result if bias is None else result + bias.double()).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [T, H] with weight [H] (RMSNorm) -> [T, H], in fp64."""
    wide = x.double()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()).float()


def moe(
    x: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    gate: list[RawTensor] | None,
    up: list[RawTensor],
    down: list[RawTensor],
) -> Tensor:
    """Compute SiLU experts without biases, one token and one expert at a time. Shapes as in `cpu.MoeKernel.forward`."""
    out = torch.zeros_like(x)
    for token in range(x.shape[0]):
        for slot in range(topk_ids.shape[1]):
            expert = int(topk_ids[token, slot])
            if expert == len(up):
                continue
            row = x[token : token + 1]
            hidden = linear(row, up[expert])
            hidden = functional.silu(hidden) if gate is None else functional.silu(linear(row, gate[expert])) * hidden
            out[token] += topk_weights[token, slot] * linear(hidden, down[expert])[0]
    return out


def _slots(pages: RowPages, row: int, positions: Tensor) -> Tensor:
    """The slots of some positions of a row's sequence."""
    page_size = pages.page_size
    return pages.block_table[int(pages.seq_ids[row])][positions // page_size].long() * page_size + positions % page_size


def attention(call: AttentionCall) -> Tensor:
    """Compute causal attention over a paged cache, one row at a time, in fp64.

    Caches are of any float type. Raises ValueError for codes with scales: it takes the numbers that they stand for.
    """
    if any(of is not None for of in call.scales):
        raise ValueError("the oracle takes no codes with scales: give it the numbers that they stand for")
    q, (_, kv_heads, dim_v) = call.q, call.v_cache.shape
    heads = q.shape[1]
    out = torch.zeros(q.shape[0], heads, dim_v)
    for row in range(q.shape[0]):
        length = int(call.pages.kv_lens[row])
        oldest = 0
        if call.window:
            oldest = (length - 1) // call.window * call.window if call.is_chunked else length - call.window
        positions = torch.arange(max(0, oldest), length)
        if positions.numel() == 0:
            continue
        slots = _slots(call.pages, row, positions)
        keys = call.k_cache[slots].double().repeat_interleave(heads // kv_heads, dim=1)
        values = call.v_cache[slots].double().repeat_interleave(heads // kv_heads, dim=1)
        scores = torch.einsum("hd,phd->hp", q[row].double(), keys) * call.scale
        if call.softcap:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.sinks is not None:
            scores = torch.cat([scores, call.sinks.double()[:, None]], dim=1)
        probabilities = torch.softmax(scores, dim=1)[:, : positions.numel()]
        out[row] = torch.einsum("hp,phd->hd", probabilities, values).float()
    return out


def quantize_kv(rows: Tensor, dtype: torch.dtype, split: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return keys or values fp32 [T, H, D] as a cache keeps them: codes of `dtype` [T, H, D], scales fp32 [T, H,
    parts].

    Codes of 8 bits: a head's largest magnitude is the type's largest, 127 or 448; what is below 2^-100 becomes 0, and a
    head with infinities or NaN has a scale that is NaN. split: the first `split` dimensions have a scale of their own,
    and so have the others (latent keys); 0: one scale. Scales are None for wider types.
    """
    if dtype.itemsize > 1:
        return rows.to(dtype), None
    codes, scales = [], []
    for part in (rows[..., :split], rows[..., split:]) if split else (rows,):
        largest = part.abs().amax(-1, keepdim=True)
        most = torch.full_like(largest, 127.0 if dtype is torch.int8 else 448.0)
        is_used, is_finite = (largest >= 2.0**-100) & largest.isfinite(), largest.isfinite()
        scaled = torch.where(is_used, part, 0.0) * torch.where(is_used, most / largest, 0.0)
        codes.append(scaled.round().to(dtype) if dtype is torch.int8 else scaled.to(dtype))
        scales.append(torch.where(is_used, largest / most, torch.where(is_finite, 0.0, torch.nan)))
    return torch.cat(codes, dim=-1), torch.cat(scales, dim=-1)


def select_topk_positions(call: TopkCall) -> list[list[int]]:
    """Choose the slots of each row, or head of a row; one row at a time, in fp64. See `cpu.select_topk_positions`."""
    chosen, block = [], call.block
    for row in range(call.q.shape[0]):
        length = int(call.pages.kv_lens[row])
        slots = _slots(call.pages, row, torch.arange(length))
        dots = torch.einsum("hd,pd->hp", call.q[row].double(), call.k_cache[slots].double()) * call.scale
        scores = dots if call.weights is None else (call.weights[row].double() @ dots.relu())[None]
        for of_positions in scores.tolist():
            count = -(-length // block)
            best = [max(of_positions[b * block : (b + 1) * block]) for b in range(count)]
            ranks = [(-float("inf") if b >= count - call.num_local else -best[b], b) for b in range(count)]
            taken = sorted(b for _, b in sorted(ranks)[: call.num_chosen])
            chosen.append([int(slots[p]) for b in taken for p in range(b * block, min((b + 1) * block, length))])
    return chosen
