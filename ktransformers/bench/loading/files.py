"""Files of random weights to load: a Qwen3-MoE model as GGUF, or as safetensors in BF16 or FP8.

What is in them is of no use but to be loaded and timed: layers share their bytes, routers choose evenly.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import gguf
import numpy as np
import safetensors.torch
import torch

from ktransformers.kernels.types import FP8_BLOCK, QuantType
from ktransformers.weights.synthetic import EMBEDDING_GAIN, random_blocks

__all__ = ["FORMATS", "FileFormat", "FileShape", "without_vocabulary", "write_files", "write_gguf", "write_safetensors"]

FileFormat = Literal["gguf", "bf16", "fp8"]
FORMATS: tuple[FileFormat, ...] = get_args(FileFormat)


@dataclass(frozen=True, slots=True)
class FileShape:
    """The shape of a Qwen3-MoE model, that of 30B-A3B."""

    layers: int
    hidden: int = 2048
    experts: int = 128
    width: int = 768
    heads: int = 32
    vocab: int = 151_936
    kv_heads: int = 4
    head_dim: int = 128


def write_files(folder: Path, shape: FileShape, kind: FileFormat) -> Path:
    """Write a model's files; return what to load: a GGUF file, or `folder`."""
    if kind == "gguf":
        write_gguf(folder / "random.gguf", shape)
        return folder / "random.gguf"
    write_safetensors(folder, shape, is_fp8=kind == "fp8")
    return folder


def without_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add to a GGUF file that it has no tokenizer."""
    writer.add_string("tokenizer.ggml.model", "no_vocab")


def write_gguf(
    path: Path,
    shape: FileShape,
    arch: str = "qwen3moe",
    add_more: Callable[[gguf.GGUFWriter], None] = without_vocabulary,
) -> None:
    """Write a GGUF file with a mixture of types as llama.cpp's Q4_K_M. add_more: adds other metadata."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(shape.layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_feed_forward_length(3 * shape.hidden)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(shape.width)
    writer.add_vocab_size(shape.vocab)
    add_more(writer)
    made: dict[tuple[QuantType, tuple[int, ...]], np.ndarray] = {}
    for name, qtype, size in _gguf_tensors(shape):
        if (qtype, size) not in made:
            gain = EMBEDDING_GAIN if name.startswith("token_embd") else 1.0
            made[qtype, size] = _random_tensor(qtype, size, len(made), gain)
        writer.add_tensor(name, made[qtype, size], raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _random_tensor(qtype: QuantType, size: tuple[int, ...], seed: int, gain: float) -> np.ndarray:
    if qtype is QuantType.F32:
        if len(size) == 1:
            return np.ones(size, dtype=np.float32)
        return np.random.default_rng(seed).standard_normal(size, dtype=np.float32) * np.float32(0.02)
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]
    data = np.empty(int(np.prod(size)) // block * nbytes, dtype=np.uint8)
    random_blocks(data, qtype, (seed,), gain)
    return data.reshape(*size[:-1], -1)


def _gguf_tensors(shape: FileShape) -> Iterator[tuple[str, QuantType, tuple[int, ...]]]:
    """Name, type and size of every one."""
    q4, q6, f32 = QuantType.Q4_K, QuantType.Q6_K, QuantType.F32
    hidden, experts, width = shape.hidden, shape.experts, shape.width
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield "token_embd.weight", q4, (shape.vocab, hidden)
    yield "output.weight", q6, (shape.vocab, hidden)
    yield "output_norm.weight", f32, (hidden,)
    for layer in range(shape.layers):
        for name, qtype, size in (
            ("attn_norm", f32, (hidden,)),
            ("ffn_norm", f32, (hidden,)),
            ("attn_q_norm", f32, (shape.head_dim,)),
            ("attn_k_norm", f32, (shape.head_dim,)),
            ("ffn_gate_inp", f32, (experts, hidden)),
            ("attn_q", q4, (queries, hidden)),
            ("attn_k", q4, (keys, hidden)),
            ("attn_v", q4, (keys, hidden)),
            ("attn_output", q4, (hidden, queries)),
            ("ffn_gate_exps", q4, (experts, width, hidden)),
            ("ffn_up_exps", q4, (experts, width, hidden)),
            ("ffn_down_exps", q6, (experts, hidden, width)),
        ):
            yield f"blk.{layer}.{name}.weight", qtype, size


def write_safetensors(folder: Path, shape: FileShape, is_fp8: bool) -> None:
    """Write safetensors with a tensor for each expert's matrix, as Qwen publishes them.

    is_fp8: matrices of layers, with scales of blocks.
    """
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_experts": shape.experts,
        "num_experts_per_tok": min(8, shape.experts),
        "moe_intermediate_size": shape.width,
        "intermediate_size": 3 * shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 4096,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    }
    if is_fp8:
        blocks = [FP8_BLOCK, FP8_BLOCK]
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": blocks}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(0, 256, (2 * shape.vocab * shape.hidden,), dtype=torch.uint8, generator=generator)
    outside = {name: _bf16(bits, (shape.vocab, shape.hidden)) for name in ("model.embed_tokens", "lm_head")}
    outside["lm_head"] = outside["lm_head"].clone()
    outside["model.norm"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    named = {f"{name}.weight": tensor for name, tensor in outside.items()}
    safetensors.torch.save_file(named, folder / "outside.safetensors")
    for layer in range(shape.layers):
        made = dict(_layer(shape, f"model.layers.{layer}", generator, is_fp8))
        safetensors.torch.save_file(made, folder / f"layer-{layer:03}.safetensors")


def _bf16(bits: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    """Numbers of either sign of 2 ** -15 to 2 ** -7, whose lower exponent bits are random."""
    words = bits[: 2 * int(np.prod(size))].view(torch.int16)
    return (words & -0x7C01 | 0x3800).view(torch.bfloat16).reshape(size)


def _layer(shape: FileShape, key: str, generator: torch.Generator, is_fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of every parameter of a layer."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for name, size in (
        ("input_layernorm", hidden),
        ("post_attention_layernorm", hidden),
        ("self_attn.q_norm", shape.head_dim),
        ("self_attn.k_norm", shape.head_dim),
    ):
        yield f"{key}.{name}.weight", torch.ones(size, dtype=torch.bfloat16)
    matrices = [
        ("self_attn.q_proj", (queries, hidden)),
        ("self_attn.k_proj", (keys, hidden)),
        ("self_attn.v_proj", (keys, hidden)),
        ("self_attn.o_proj", (hidden, queries)),
    ]
    for expert in range(shape.experts):
        matrices.append((f"mlp.experts.{expert}.gate_proj", (shape.width, hidden)))
        matrices.append((f"mlp.experts.{expert}.up_proj", (shape.width, hidden)))
        matrices.append((f"mlp.experts.{expert}.down_proj", (hidden, shape.width)))
    most = 2 * max(rows * cols for _, (rows, cols) in [*matrices, ("router", (shape.experts, hidden))])
    bits = torch.randint(0, 256, (most,), dtype=torch.uint8, generator=generator)
    yield f"{key}.mlp.gate.weight", _bf16(bits, (shape.experts, hidden)).clone()
    for name, (rows, cols) in matrices:
        if not is_fp8:
            yield f"{key}.{name}.weight", _bf16(bits, (rows, cols)).clone()
            continue
        codes = (bits[: rows * cols] & 0xBF).view(torch.float8_e4m3fn)  # below 2
        yield f"{key}.{name}.weight", codes.reshape(rows, cols).clone()
        scales = torch.full((-(-rows // FP8_BLOCK), -(-cols // FP8_BLOCK)), 0.01)
        yield f"{key}.{name}.weight_scale_inv", scales
