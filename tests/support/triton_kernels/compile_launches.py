"""Compiles for a GPU what calls would launch, on a machine without one: what the interpreter does not check.

    python -m tests.support.triton_kernels.compile_launches [--sm 80|86|89|90|120]
        [--attention|--recurrent|--routers|--few|--all]

Launches are caught, their arguments turned into a signature, and the kernels compiled for such a GPU. Prints a line for
each; exits with an error for one that does not compile, keeps arrays in local memory or needs more shared memory than
there is, for attention and products with block-wise int16 that spill registers, and for products of codes that are no
such.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ktransformers.kernels.attention_call import AttentionCall, RowPages, TopkCall
from ktransformers.kernels.cpu.router import RouterSpec, Scoring
from ktransformers.kernels.triton.attention.compressed import Entries, attended, keep_values, make_entries, turn
from ktransformers.kernels.triton.attention.kv_codes import widen_latents
from ktransformers.kernels.triton.attention.latent import absorb, expand, norm_to_cache
from ktransformers.kernels.triton.attention.materialized import (
    MaterializedRun,
    materialized_attention,
    materialized_tile,
    tiles_of,
)
from ktransformers.kernels.triton.attention.mla import mla_attention
from ktransformers.kernels.triton.attention.paged import attention
from ktransformers.kernels.triton.attention.pools import expanded, pooled, rows_to_cache
from ktransformers.kernels.triton.attention.rope import (
    HeadNorms,
    KvSlots,
    LatentSlots,
    Rotation,
    latent_to_cache,
    rope_to_cache,
)
from ktransformers.kernels.triton.attention.topk_positions import select_topk_positions
from ktransformers.kernels.triton.common import runtime
from ktransformers.kernels.triton.common.candidates import BestTokens
from ktransformers.kernels.triton.common.clock import write_device_time
from ktransformers.kernels.triton.common.convert import convert_rows
from ktransformers.kernels.triton.common.elementwise import add_rms_norm, gate_heads
from ktransformers.kernels.triton.experts.matrices import SILU, ExpertMatrices, MoeEpilogue, MoeMatrices, RoutedRows
from ktransformers.kernels.triton.experts.moe import moe
from ktransformers.kernels.triton.experts.router import MAX_ROUTED_ROWS, Chosen, SlotSplit, route_rows, topk_router
from ktransformers.kernels.triton.experts.slot_map import split_pairs, sum_onto
from ktransformers.kernels.triton.linear.linear import gated_linear, linear, linear_pair
from ktransformers.kernels.triton.quant.dequant import WeightMatrix, dequantize
from ktransformers.kernels.triton.quant.repack import CPU_PACKED_TYPES, GpuLayout, can_repack, layout_nbytes
from ktransformers.kernels.types import Activation, ActivationSpec, GroupType, OwnType, QuantType
from tests.support.triton_kernels.recurrent_launches import all_recurrent, call_delta_net, call_selective, call_ssd
from tests.support.triton_kernels.stream_launches import call_gated_streams, call_hyper

# By compute capability: what one program can have at most, as the CUDA programming guide has it.
SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 120: 99 << 10}
TYPES = (QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q4_0, QuantType.MXFP4)
GRIDS = (
    QuantType.IQ2_XXS,
    QuantType.IQ2_XS,
    QuantType.IQ2_S,
    QuantType.IQ3_XXS,
    QuantType.IQ3_S,
    QuantType.IQ1_S,
    QuantType.IQ1_M,
)
POINTERS = {
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
}
MOST_SPILLED = 128  # bytes of a thread of grouped attention, in one Triton or another; latent attention spills nothing
compiled = set()
target = 90


def describe(value):
    """The type of an argument in a signature, and whether it is known to be a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    return "i32", value % 16 == 0


def of_a_thread(kernel):
    """Registers, and bytes of stack: without arrays there, what is spilled. As the tool says that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    values = dict(part.split(":") for part in said.split() if part.startswith(("REG:", "STACK:")))
    return int(values["REG"]), int(values["STACK"])


def compile_launch(self, *args, grid, warmup, num_warps=4, num_stages=3, **kwargs):
    """Takes the place of JITFunction.run."""
    names = self.arg_names
    values = dict(zip(names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(self.params):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", values[parameter.name]
        elif values[parameter.name] is None or (
            type(values[parameter.name]) is int and values[parameter.name] == 1 and not parameter.do_not_specialize
        ):
            # Triton makes them constants
            signature[parameter.name], constants[(index,)] = "constexpr", values[parameter.name]
        else:
            signature[parameter.name], multiple = describe(values[parameter.name])
            if multiple and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
                attributes[(index,)] = [["tt.divisibility", 16]]
    key = (self.fn.__name__, num_warps, tuple(signature.items()), tuple(constants.items()), tuple(attributes))
    if key in compiled:
        return
    compiled.add(key)
    source = ASTSource(self, signature, constants, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    local = kernel.asm["ptx"].count(".local .align")
    registers, stack = of_a_thread(kernel)
    print(
        f"{self.fn.__name__:20} warps {num_warps} shared {kernel.metadata.shared:6} registers {registers:3} "
        f"stack {stack:4} {list(constants.values())}",
        flush=True,
    )
    if kernel.metadata.shared > SHARED_BYTES[target] or local:
        sys.exit(f"{self.fn.__name__}: {kernel.metadata.shared} bytes of shared memory, {local} local arrays")
    if self.fn.__name__ in ("decode_kernel", "prefill_kernel"):
        is_latent = constants[(self.arg_names.index("SHARED"),)]
        if stack > (0 if is_latent else MOST_SPILLED):
            sys.exit(f"{self.fn.__name__}: {stack} bytes of registers are spilled")
    if values.get("QUANTIZED_ATTENTION"):
        factors = ".e4m3.e4m3" if "fp8e4nv" in signature["k_ptr"] else ".s8.s8"
        if not any("mma" in line and factors in line for line in kernel.asm["ptx"].splitlines()):
            sys.exit(f"{self.fn.__name__}: there are no tensor-core products of {factors}")
    if stack and "*i32" in (signature.get("x"), signature.get("hidden")):
        sys.exit(f"{self.fn.__name__} with digits: {stack} bytes of registers are spilled")


def weights(qtype, rows, cols, layout, num=1):
    return torch.zeros(num, layout_nbytes(qtype, rows, cols, layout), dtype=torch.uint8)


def matrix(qtype, rows, cols, layout=GpuLayout.PLANES):
    return WeightMatrix(weights(qtype, rows, cols, layout), qtype, rows, cols, layout)


def call_linear(qtype, rows, cols, tokens, layout=GpuLayout.PLANES, dtype=torch.bfloat16, bias=None):
    linear(torch.zeros(tokens, cols, dtype=dtype), matrix(qtype, rows, cols, layout), bias)


def call_pair(types, rows, cols, tokens):
    x = torch.zeros(tokens, cols, dtype=torch.bfloat16)
    linear_pair(x, tuple(matrix(*each, cols) for each in zip(types, rows, strict=True)))


def call_gated(qtype, rows, cols, tokens):
    gated_linear(torch.zeros(tokens, cols, dtype=torch.bfloat16), matrix(qtype, rows, cols), Activation.SILU)


def call_moe(types, hidden, width, tokens, layout=GpuLayout.PLANES, num=8, top_k=4, epilogue=SILU):
    first, second = types
    gate = ExpertMatrices(weights(first, width, hidden, layout, num), first, width, hidden, layout)
    down = ExpertMatrices(weights(second, hidden, width, layout, num), second, hidden, width, layout)
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    moe(RoutedRows(x, ids, torch.zeros(tokens, top_k)), MoeMatrices(gate, gate, down, epilogue))


def call_gpt_oss(qtype, tokens, layout=GpuLayout.PLANES, num=8, hidden=2880):
    biases = (torch.zeros(num, hidden), torch.zeros(num, hidden), torch.zeros(num, hidden))
    epilogue = MoeEpilogue(ActivationSpec(Activation.SWIGLU_OAI), biases)
    call_moe((qtype, qtype), hidden, hidden, tokens, layout, num, epilogue=epilogue)


def call_hot(num_experts, hidden, tokens, top_k=8):
    """Ids as routers of ours give them, and as those of transformers do."""
    slots, picks = torch.zeros(num_experts, dtype=torch.int32), torch.zeros(num_experts, dtype=torch.int64)
    chosen = Chosen(picks, torch.zeros(tokens, dtype=torch.int64))
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    split_pairs(ids, slots, chosen, picks)
    split_pairs(ids.long(), slots, None, picks)
    parts, base = torch.zeros(tokens * top_k, hidden, dtype=torch.bfloat16), torch.zeros(tokens, hidden)
    sum_onto(base.bfloat16(), parts, ids, num_experts, base)


def call_router(num_experts, hidden, tokens, spec, has_bias=False):
    x, counters = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(MAX_ROUTED_ROWS, dtype=torch.int32)
    bias = torch.zeros(num_experts) if has_bias else None
    chosen = Chosen(torch.zeros(num_experts, dtype=torch.int64), torch.zeros(tokens, dtype=torch.int64))
    logits, _, _ = route_rows(x, torch.zeros(num_experts, hidden), spec, counters, bias, chosen=chosen)
    topk_router(logits, spec, bias)
    slot_of, elsewhere = torch.zeros(num_experts, dtype=torch.int32), torch.zeros(tokens, spec.top_k, dtype=torch.int32)
    split = Chosen(chosen.counts, chosen.slots, None, SlotSplit(slot_of, chosen.counts, elsewhere))
    route_rows(x, torch.zeros(num_experts, hidden), spec, counters, bias, chosen=split)
    topk_router(logits, spec, bias, chosen=split)
    write_device_time(chosen.counts, 3)


def all_routers():
    deepseek_v3 = RouterSpec(8, Scoring.SIGMOID, num_groups=8, topk_groups=4, scaling=2.5)
    call_router(256, 7168, 4, deepseek_v3, has_bias=True)
    for scoring in Scoring:
        call_router(128, 2048, 1, RouterSpec(8, scoring))


def call_attention(heads, kv_heads, dim, tokens, seqs, pages=64):
    cache, ids = torch.zeros(256, kv_heads, dim, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int32)
    table, counters = torch.zeros(seqs, pages, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    q = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16)
    attention(AttentionCall(q, cache, cache, RowPages(table, 256, ids, ids), 0.1), counters=counters)


def call_gated_attention(heads, kv_heads, dim, rotary, tokens):
    """Queries with gates beside them, norms, and a part of each head rotated (Qwen3-Next)."""
    beside = torch.zeros(tokens, heads, 2 * dim, dtype=torch.bfloat16)
    k, cache = beside.new_zeros(tokens, kv_heads, dim), beside.new_zeros(64, kv_heads, dim)
    angles, slots, norms = torch.zeros(tokens, rotary), torch.zeros(tokens, dtype=torch.int64), torch.zeros(2, dim)
    query = beside.new_empty(tokens, heads, dim)
    rotation, target = Rotation(angles, angles, rotary_dim=rotary), KvSlots(cache, cache, slots)
    rope_to_cache((beside[..., :dim], k, k), rotation, target, HeadNorms(norms[0], norms[1], 1e-6), q_out=query)
    call_attention(heads, kv_heads, dim, tokens, 1)
    gate_heads(query, beside[..., dim:], out=query)


def call_mla(heads, tokens, seqs, pages=64):
    cache, ids = torch.zeros(256, 1, 576, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int32)
    q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)
    where = RowPages(torch.zeros(seqs, pages, dtype=torch.int32), 256, ids, ids)
    mla_attention(AttentionCall(q, cache, cache[..., :512], where, 0.1))


def call_coded(dtype, heads, kv_heads, dim, tokens, seqs=1, pages=64, quantized_attention=False):
    """Keys and values as codes: written, and attended to; widened where the target has no products of e4m3."""
    quantized_attention = quantized_attention and (dtype == torch.int8 or target >= 89)
    cache, scales = torch.zeros(256, kv_heads, dim, dtype=dtype), torch.zeros(256, kv_heads, 1)
    q, ids = torch.zeros(tokens, heads, dim, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int32)
    k, angles, both = q.new_zeros(tokens, kv_heads, dim), torch.zeros(tokens, dim // 2), (scales, scales)
    query = rope_to_cache((q, k, k), Rotation(angles, angles), KvSlots(cache, cache, ids.long(), both))
    table, counters = torch.zeros(seqs, pages, dtype=torch.int32), torch.zeros(1024, dtype=torch.int32)
    call = AttentionCall(query, cache, cache, RowPages(table, 256, ids, ids), 0.1, scales=both)
    attention(call, counters=counters, quantized_attention=quantized_attention)


def call_coded_latents(dtype, heads, tokens, seqs=1, pages=64, rank=512, rotary=64):
    """Latents as codes: written by either kernel, attended to, and widened for expanded keys."""
    cache, scales = torch.zeros(256, 1, rank + rotary, dtype=dtype), torch.zeros(256, 1, 2)
    q, ids = torch.zeros(tokens, heads, rank + rotary, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int32)
    rows, angles, slots = q[:, 0].contiguous(), torch.zeros(tokens, rotary // 2), ids.long()
    norm = rows[0, :rank], 1e-6
    rotation, target = Rotation(angles, angles, True), LatentSlots(cache, slots, scales)
    norm_to_cache(rows, norm, rotation, target)
    latent_to_cache(q[..., rank:].contiguous(), rows, norm, rotation, target)
    where = RowPages(torch.zeros(seqs, pages, dtype=torch.int32), 256, ids, ids)
    mla_attention(AttentionCall(q, cache, cache[..., :rank], where, 0.1, scales=(scales, None)))
    widen_latents(cache, scales, rank, slots, rows)


def call_chosen(heads, tokens, is_summed=True, chosen=32):
    """The choice of positions, and latent attention to them: pages of one position."""
    cache, ids = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(tokens, dtype=torch.int32)
    q, weights = torch.zeros(tokens, heads, 128, dtype=torch.bfloat16), torch.zeros(tokens, heads)
    table = torch.zeros(tokens, 2, dtype=torch.int32)
    where = RowPages(table, 128, ids, ids)
    slots, counts = select_topk_positions(TopkCall(q, weights if is_summed else None, cache, where, 0.1, chosen))
    if is_summed:  # what pools of positions are made of
        keys = torch.zeros(256, 256, dtype=torch.bfloat16)
        rows_to_cache(keys[:tokens], keys, ids, ids)
        pooled(keys, keys[:16, :128].contiguous(), where, 128, 16)
        pooled(cache, None, where, 128, 4)
        expanded(slots, counts, where, 4)
    latents, rows = torch.zeros(256, 1, 576, dtype=torch.bfloat16), torch.zeros(tokens, 16, 576, dtype=torch.bfloat16)
    if is_summed:
        mla_attention(AttentionCall(rows, latents, latents[..., :512], RowPages(slots, 1, ids, counts), 0.1))


def call_latent(tokens, heads=128, rank=512, rotary=64, width=128, query=1536):
    cos, slots = torch.zeros(tokens, rotary // 2), torch.zeros(tokens, dtype=torch.int64)
    both = torch.zeros(tokens, query + rank + rotary, dtype=torch.bfloat16)
    cache = torch.zeros(256, 1, rank + rotary, dtype=torch.bfloat16)
    norms = (both[0, :rank], 1e-6), (both[0, :query], 1e-6)
    rotation = Rotation(cos, cos, True)
    norm_to_cache(both[:, query:], norms[0], rotation, LatentSlots(cache, slots), both[:, :query], norms[1])
    q = torch.zeros(tokens, heads, width + rotary, dtype=torch.bfloat16)
    absorbed = absorb(q, torch.zeros(heads, width, rank, dtype=torch.bfloat16), rotation)
    expand(absorbed[..., :rank].contiguous(), torch.zeros(heads, rank, width, dtype=torch.bfloat16))


def call_compressed(tokens, heads=64, dim=512, rotary=64, window=128):
    """DeepSeek-V4: 4 tokens of an entry, which overlap, and 128."""
    bf16, units = torch.bfloat16, 8
    cos, slots = torch.zeros(tokens, rotary // 2), torch.zeros(tokens, dtype=torch.int64)
    ids, cache = torch.zeros(tokens, dtype=torch.int32), torch.zeros(256, 1, units * dim, dtype=bf16)
    pages = RowPages(torch.zeros(2, 3, dtype=torch.int32), 64, ids, ids)
    q, norm = torch.zeros(tokens, heads, dim, dtype=bf16), torch.zeros(dim)
    turn(q, cos, cos, norm=(None, 1e-6))
    turn(q, cos, cos, is_back=True)
    turn(q[..., :128], cos, cos)
    turn(q[:, :1], cos, cos, norm=(norm, 1e-6), cache=cache, slot_mapping=slots)
    for rate, series in ((4, 2), (128, 1)):
        values = torch.zeros(tokens, series * dim, dtype=bf16)
        keep_values(values, values, cache[:, 0], 2 * dim, slots)
        bias = torch.zeros(rate, series * dim)
        make_entries(cache[:, 0], Entries(rate, series, dim, 2 * dim, bias, norm, 1e-6, cos[0], 1.0), slots, pages)
    attended(pages, window, 1, window)
    attended(pages, window, units, 64 + window, rate=128, most=64)
    chosen = torch.zeros(tokens, 512, dtype=torch.int32)
    table, counts = attended(pages, window, units, 512 + window, rate=4, most=512, chosen=chosen)
    rows = torch.arange(tokens, dtype=torch.int32)
    parts = cache.view(-1, 1, dim)
    mla_attention(AttentionCall(q, parts, parts, RowPages(table, 1, rows, counts), 0.05, sinks=torch.zeros(heads)))
    expand(q.view(tokens, 8, -1), torch.zeros(8, heads * dim // 8, 1024, dtype=bf16))


def call_expanded(heads, rows, length, nope=128, rotary=64, width=128):
    tile = materialized_tile(rows, heads, torch.bfloat16, torch.device("cpu"))
    q = torch.zeros(rows, heads, nope + rotary, dtype=torch.bfloat16)
    latents = torch.zeros(length, 512 + rotary, dtype=torch.bfloat16)
    keys = torch.zeros(heads, length, nope, dtype=torch.bfloat16)
    values, out = keys.new_zeros(heads, length, width), keys.new_zeros(rows, heads, width)
    tiles = tiles_of([MaterializedRun(0, rows, 0, length)], tile.block_m)
    queries, cached = (q, q[..., nope:].contiguous()), (keys, latents[:, 512:], values)
    materialized_attention(queries, cached, tiles, 0.1, out, tile)


def call_candidates(vocab, rows=2, room=128):
    tools, logits = BestTokens.make(rows, vocab, room, torch.device("cpu")), torch.zeros(rows, vocab)
    tools.find_best(logits)
    tools.find_candidates(logits, 20)


def call_norm(hidden, tokens):
    x = torch.zeros(tokens, hidden, dtype=torch.bfloat16)
    add_rms_norm(x, x, x[0], 1e-6, more=x, gate=x[:, :1])


def call_fp8(rows, cols, tokens):
    layout = GpuLayout.PLANES if can_repack(OwnType.F8_E4M3, rows, cols) else GpuLayout.ROWS
    call_linear(OwnType.F8_E4M3, rows, cols, tokens, layout)


def call_convert(rows, hidden, num=3):
    sources = [torch.zeros(rows, hidden, dtype=torch.bfloat16), torch.zeros(rows, 8).long(), torch.zeros(rows, 8)]
    convert_rows([sources[0].clone(), sources[1].int(), sources[2].clone()][:num], sources[:num])


def all_attention():
    """What takes as much shared memory as there is."""
    call_attention(32, 4, 128, 2, 2)
    call_attention(64, 8, 64, 600, 1)
    call_attention(32, 4, 128, 600, 4)
    call_mla(128, 2, 2)
    call_mla(16, 2, 2)
    call_mla(20, 2, 2)
    call_mla(128, 200, 1)
    call_mla(16, 200, 1)
    call_expanded(128, 256, 512)
    call_expanded(4, 128, 256)
    all_coded((torch.int8, torch.float8_e4m3fn))


def all_coded(dtypes):
    """The first type in decode of grouped queries and prefill of latents, the other the other way round."""
    call_coded(dtypes[0], 32, 4, 128, 2, seqs=2)
    call_coded(dtypes[1], 32, 4, 128, 600, seqs=4)
    call_coded(dtypes[0], 32, 4, 128, 600, quantized_attention=True)
    call_coded(dtypes[1], 64, 8, 64, 600, seqs=4, quantized_attention=True)
    call_coded_latents(dtypes[1], 128, 2, seqs=2)
    call_coded_latents(dtypes[0], 128, 200)
    call_coded_latents(dtypes[1], 20, 2)


def few():
    """Every kernel once or twice."""
    all_attention()
    call_delta_net(1, 16, 32, 128, 128)
    call_ssd(64, 1, 2, 32, 32)
    call_selective(1, 64, 16)
    call_chosen(64, 2)
    call_chosen(4, 2, is_summed=False)
    call_convert(4, 2048)
    call_latent(2)
    call_compressed(2)
    call_hyper(2)
    call_gated_streams(2)
    call_norm(7168, 2)
    call_candidates(151_936)
    call_gated_attention(16, 2, 256, 64, 1)
    all_routers()
    call_linear(QuantType.Q4_K, 2048, 4096, 1)
    call_linear(QuantType.Q6_K, 2048, 2048, 200)
    call_moe((QuantType.Q4_K, QuantType.Q6_K), 2048, 768, 1)
    call_hot(128, 2048, 1)
    call_gpt_oss(QuantType.MXFP4, 600, layout=GpuLayout.CPU_PACKED)
    call_fp8(576, 7168, 2)
    call_moe((QuantType.IQ2_XXS, QuantType.IQ3_S), 2048, 768, 1, layout=GpuLayout.CPU_PACKED)
    call_linear(QuantType.IQ1_M, 2048, 512, 20, layout=GpuLayout.CPU_PACKED)
    call_moe((QuantType.Q2_K, QuantType.IQ4_XS), 2048, 768, 1, layout=GpuLayout.CPU_PACKED)
    call_linear(QuantType.Q5_1, 2048, 512, 20, layout=GpuLayout.CPU_PACKED)
    call_moe((GroupType.I4_128_F16, GroupType.NVFP4_F32), 2048, 768, 20, layout=GpuLayout.CPU_PACKED)


def some():
    few()
    all_coded((torch.float8_e4m3fn, torch.int8))
    call_convert(1, 2880, 1)
    call_pair((QuantType.Q4_K, QuantType.Q6_K), (4608, 512), 2048, 2)
    call_gated(QuantType.Q4_K, 4096, 7168, 4)
    call_gated(QuantType.Q4_K, 4096, 7168, 16)
    call_moe((QuantType.Q4_K, QuantType.Q8_0), 2048, 1408, 40)
    call_moe((QuantType.Q4_0, QuantType.Q4_0), 32, 32, 1, layout=GpuLayout.ROWS, num=1, top_k=1)
    call_moe((QuantType.Q4_K, QuantType.Q6_K), 2048, 768, 600, layout=GpuLayout.CPU_PACKED)
    call_gpt_oss(QuantType.MXFP4, 1)
    call_moe((QuantType.BF16, QuantType.BF16), 2048, 768, 4, layout=GpuLayout.ROWS)
    call_moe((QuantType.BF16, QuantType.BF16), 2048, 768, 600, layout=GpuLayout.CPU_PACKED)
    call_moe((OwnType.F8_E4M3, OwnType.F8_E4M3), 2048, 768, 600, layout=GpuLayout.CPU_PACKED)


def everything():
    some()
    for qtype in TYPES:
        for layout in GpuLayout:
            for tokens in (1, 2, 3, 4, 9, 20, 50, 300):
                if layout == GpuLayout.PLANES or tokens in (1, 300):
                    call_linear(qtype, 768, 2048, tokens, layout)
            out = torch.empty(768, 512, dtype=torch.float16)
            dequantize(matrix(qtype, 768, 512, layout), out)
    for number, qtype in enumerate(GRIDS):
        for tokens in (1 + number % 4, 20 if number % 2 else 300):
            call_linear(qtype, 768, 2048, tokens, GpuLayout.CPU_PACKED)
        call_moe((qtype, GRIDS[number - 1]), 2048, 768, 1, layout=GpuLayout.CPU_PACKED)
        call_moe((qtype, qtype), 2048, 768, 600, layout=GpuLayout.CPU_PACKED)
    for qtype in (*GRIDS, QuantType.IQ4_XS, QuantType.IQ4_NL, QuantType.Q2_K, QuantType.Q3_K):
        for tokens in (1, 16):
            call_moe((qtype, qtype), 2048, 768, tokens, layout=GpuLayout.CPU_PACKED, num=128, top_k=8)
    for number, qtype in enumerate(sorted(CPU_PACKED_TYPES)):
        for tokens in (1 + number % 4, 20 if number % 2 else 300):
            call_linear(qtype, 768, 2048, tokens, GpuLayout.CPU_PACKED)
    call_linear(QuantType.Q8_0, 1416, 1408, 1, bias=torch.zeros(1416))
    call_linear(QuantType.Q4_0, 1416, 1440, 30, dtype=torch.float16)
    call_linear(QuantType.Q4_K, 76032, 2048, 1)
    assert not can_repack(QuantType.Q4_K, 2052, 256)
    call_linear(QuantType.Q4_K, 2052, 256, 1, layout=GpuLayout.ROWS)
    for tokens in (1, 3, 4, 16, 100):
        call_pair((QuantType.Q4_K, QuantType.Q6_K), (4608, 512), 2048, tokens)
        call_gated(QuantType.Q4_K, 4096, 7168, tokens)
    for types in ((QuantType.Q4_K, QuantType.Q6_K), (QuantType.Q5_K, QuantType.Q5_K), (QuantType.Q8_0, QuantType.Q4_0)):
        for tokens in (2, 17, 40, 100, 600):
            call_moe(types, 512, 768, tokens)
        call_moe(types, 512, 768, 3, layout=GpuLayout.ROWS)
        call_moe(types, 512, 768, 2100, layout=GpuLayout.CPU_PACKED)
    for tokens in (1, 17, 40, 600, 2100):
        for layout in GpuLayout:
            call_gpt_oss(QuantType.MXFP4, tokens, layout)
    for tokens in (1, 17, 600, 2100):
        for layout in GpuLayout:
            call_moe((OwnType.F8_E4M3, OwnType.F8_E4M3), 2048, 768, tokens, layout)
        for layout in (GpuLayout.ROWS, GpuLayout.CPU_PACKED):
            call_moe((QuantType.BF16, QuantType.BF16), 2048, 768, tokens, layout)
        call_moe((QuantType.F16, QuantType.F16), 2048, 768, tokens, GpuLayout.ROWS)
    for tokens in (1, 4, 16, 200):
        call_fp8(576, 7168, tokens)
        call_fp8(577, 160, tokens)


def main():
    global target
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sm", type=int, default=90, choices=sorted(SHARED_BYTES))
    parser.add_argument("--attention", action="store_true", help="kernels of attention alone")
    parser.add_argument("--recurrent", action="store_true", help="kernels of recurrent layers alone")
    parser.add_argument("--routers", action="store_true", help="kernels of routers alone")
    parser.add_argument("--few", action="store_true", help="every kernel once or twice")
    parser.add_argument("--all", action="store_true", help="many more types and sizes")
    args = parser.parse_args()
    target, runtime.default_shared_bytes = args.sm, SHARED_BYTES[args.sm]
    triton.runtime.jit.JITFunction.run = compile_launch
    one_kind = all_recurrent if args.recurrent else all_attention if args.attention else None
    calls = all_routers if args.routers else one_kind or (few if args.few else some)
    (everything if args.all else calls)()


if __name__ == "__main__":
    main()
