"""Metadata and tensor shapes as published GGUF files have them."""

from __future__ import annotations

import numpy as np


def preset(arch: str, layers: int, dense: int, shapes: dict[str, tuple[int, ...]], **keys: object) -> tuple[dict, dict]:
    """Metadata and shapes as a published file of that size has them; `shapes` are per layer, "moe:" from `dense` on."""
    metadata: dict[str, object] = {"general.architecture": arch, f"{arch}.block_count": layers}
    metadata |= {f"{arch}.{key.replace('__', '.')}": value for key, value in keys.items()}
    tensors = {"output.weight": shapes["token_embd.weight"], "output_norm.weight": (1,)}
    for name, shape in shapes.items():
        if name.startswith("token_embd"):
            tensors[name] = shape
            continue
        first = dense if name.startswith("moe:") else 0
        tensors |= {f"blk.{layer}.{name.removeprefix('moe:')}": shape for layer in range(first, layers)}
    return metadata, tensors


def deepseek_v3(**changes: object) -> tuple[dict, dict]:
    values: dict[str, object] = {
        "context_length": 163840, "embedding_length": 7168, "feed_forward_length": 18432, "attention__head_count": 128,
        "attention__head_count_kv": 1, "attention__layer_norm_rms_epsilon": float(np.float32(1e-6)),
        "attention__key_length": 576, "attention__value_length": 512, "attention__key_length_mla": 192,
        "attention__value_length_mla": 128, "attention__q_lora_rank": 1536, "attention__kv_lora_rank": 512,
        "rope__dimension_count": 64, "rope__freq_base": 10000.0, "rope__scaling__type": "yarn",
        "rope__scaling__factor": 40.0, "rope__scaling__original_context_length": 4096,
        "rope__scaling__yarn_log_multiplier": float(np.float32(0.1)), "expert_count": 256, "expert_used_count": 8,
        "expert_shared_count": 1, "expert_feed_forward_length": 2048, "expert_weights_scale": 2.5,
        "expert_weights_norm": True, "expert_gating_func": 2, "leading_dense_block_count": 3,
        "expert_group_count": 8, "expert_group_used_count": 4,
    }  # fmt: skip
    values |= changes
    shapes = {
        "token_embd.weight": (129280, 7168),
        "attn_norm.weight": (7168,),
        "moe:ffn_gate_inp.weight": (int(str(values["expert_count"])), 7168),
        "moe:exp_probs_b.bias": (256,),
        "moe:ffn_gate_exps.weight": (256, 2048, 7168),
    }
    dense = int(str(values["leading_dense_block_count"]))
    return preset("deepseek2", 61, dense, shapes, **{k: v for k, v in values.items() if v is not None})
