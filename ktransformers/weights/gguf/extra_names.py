"""Names of tensors that the `gguf` package's maps lack, and all names of architectures that it does not know yet.

Facts of llama.cpp's and ik_llama.cpp's converters. Of architectures that are new (NEWER): by what follows
"model.layers.N." in the module tree; most are the same in all, and what one has otherwise stands beside it. Knows names
only.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping

__all__ = ["BY_ENDING", "CONVOLUTION", "IN_PARTS", "NEWER", "NewerNames", "converted_name"]

_WHOLE = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{f"model.hc_head.hc_{part}": f"output_hc_{part}" for part in ("fn", "base", "scale")},
}

_PROJECTIONS = ("gate", "up", "down")
_BLOCK: Mapping[str, str] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "self_attn.o_proj": "attn_output",
    "self_attn.g_proj": "attn_gate",
    "self_attn.sinks": "attn_sinks",
    # Attention over latents.
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q_a", "q_b", "kv_b", "k_b", "v_b")},
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    # Indexers: DeepSeek's, and MiniMax's.
    "self_attn.indexer.wq_b": "indexer.attn_q_b",
    "self_attn.indexer.wk": "indexer.attn_k",
    "self_attn.indexer.weights_proj": "indexer.proj",
    **{f"self_attn.indexer.{part}_norm": f"indexer.{part}_norm" for part in "qk"},
    **{f"self_attn.indexer.{part}_proj": f"indexer.{part}_proj" for part in "qk"},
    **{f"self_attn.indexer.index_kpool_compress_{part}": f"indexer_compressor_{part}" for part in ("ape", "gate")},
    # Kimi's linear attention.
    **{f"self_attn.{part}_proj": f"ssm_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
    "self_attn.b_proj": "ssm_beta",
    "self_attn.o_norm": "ssm_norm",
    "self_attn.A_log": "ssm_a",
    "self_attn.dt_proj": "ssm_dt",
    # Several residual streams.
    **{f"{of}_hc.{part}": f"hc_{of}_{part}" for of in ("attn", "ffn") for part in ("fn", "base", "scale")},
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in _PROJECTIONS},
    **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in _PROJECTIONS},
}


def _compressor(module: str, stored: str) -> dict[str, str]:
    """Names of a compressor of DeepSeek-V4."""
    parts = {"kv_proj": "kv", "gate_proj": "gate", "position_bias": "ape", "kv_norm": "norm"}
    return {f"{module}.{part}": f"{stored}_{tail}" for part, tail in parts.items()}


_STREAMS = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
_STREAMS |= {"block_inject_weight": "inject"}
_BLOCKS = {"attn": "attn", "mlp": "ffn"}
_ONCE = "per_layer_token_embd"
"""Of one layer only: files have no number in its name."""

NEWER: Mapping[str, Mapping[str, str | tuple[str, ...]]] = {
    "bailingmoe3": {"self_attn.f_proj": "ssm_f_a", "self_attn.g_proj": ("attn_gate", "ssm_g_a")},
    "cohere2_moe": {},
    "cohere2moe": {},
    "deepseek32": {},
    "deepseek4": {
        "self_attn.kv_proj": "attn_kv",
        "self_attn.q_a_norm": "attn_q_a_norm",
        "self_attn.kv_norm": "attn_kv_a_norm",
        **{f"self_attn.o_{part}_proj": f"attn_output_{part}" for part in "ab"},
        **_compressor("self_attn.compressor", "attn_compressor"),
        **_compressor("self_attn.compressor.indexer", "indexer_compressor"),
        "self_attn.compressor.indexer.q_b_proj": "indexer.attn_q_b",
        "self_attn.compressor.indexer.scorer.weights_proj": "indexer.proj",
        "mlp.gate.tid2eid": "ffn_gate_tid2eid",
    },
    "granite_swa": {"shared_mlp.input_linear": "ffn_up_shexp", "shared_mlp.output_linear": "ffn_down_shexp"},
    "glm5-next": {},
    "hy_v3": {},
    "hy_v4": {"self_attn.gate_proj": "attn_gate"},
    "laguna": {},
    "mellum": {},
    "minimax-m3": {},
    "qwen4exp": {
        **{f"model.hyper_connection_mixer.{part}": f"output_hc_{tail}" for part, tail in _STREAMS.items()},
        **{f"{of}_hyper_connection.{p}": f"hc_{at}_{t}" for of, at in _BLOCKS.items() for p, t in _STREAMS.items()},
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.A_log": "ssm_a",
        "linear_attn.dt_proj": "ssm_dt",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        **{f"self_attn.indexer.{part}_layernorm": f"indexer.{part}_norm" for part in "qk"},
        **{f"ple.{part}_proj": f"ple_{part}" for part in ("key", "value")},
        **{f"ple.{part}": f"ple_{part}" for part in ("conv1d", "norm_key", "norm_query", "norm_conv")},
        "ple.ple_embedding.ngram_embedding": _ONCE,
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in _PROJECTIONS},
    },
    "step35": {},
}
"""Architecture -> names that it has besides those of all, or in place of them. Of several, a layer has one."""

BY_ENDING: Mapping[str, str] = {
    ".e_score_correction_bias": "exp_probs_b.bias",
    ".mlp.expert_bias": "exp_probs_b.bias",  # afmoe
    ".router.scale": "ffn_gate_inp.scale",  # gemma4, as the next
    ".router.per_expert_scale": "ffn_down_exps.scale",
    ".block_sparse_moe.router.weight": "ffn_gate_inp.weight",  # granitemoe
    ".mlp.gate.wg.weight": "ffn_gate_inp.weight",  # hunyuan
    ".feed_forward.expert_bias": "exp_probs_b.bias",  # lfm2_moe
    ".eh_proj.weight": "nextn.eh_proj.weight",  # multi-token prediction, as the next
    ".enorm.weight": "nextn.enorm.weight",
    ".hnorm.weight": "nextn.hnorm.weight",
    ".fc_embedding.weight": "nextn.e_proj.weight",  # deepseek4, where eh_proj has not both
    ".fc_hidden.weight": "nextn.h_proj.weight",
    ".post_projection.weight": "nextn.post_projection.weight",  # gemma4-assistant
}
"""Of a layer's parameters that end so: their names in its block. gguf maps them from older module names only, or not at
all.
"""

_GATE_UP, _SHARED = ("ffn_gate", "ffn_up"), ("ffn_gate_shexp", "ffn_up_shexp")
CONVOLUTION = ".self_attn.conv1d.weight"
IN_PARTS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "shared_mlp.input_linear.weight": (_SHARED, _GATE_UP),  # the latter in models without other experts
    ".mlp.gate_up_proj.weight": (_GATE_UP,),
    ".shared_experts.gate_up_proj.weight": (_SHARED,),
    CONVOLUTION: (tuple(f"ssm_conv1d_{part}" for part in "qkv"),),
    ".indexer.index_qk_proj.weight": (("indexer.q_proj", "indexer.k_proj"),),
}
"""What ends so is made of these tensors of its layer, one below the other, of the first choice that the file has."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


class NewerNames:
    """Names of one architecture of NEWER, asked for as `gguf.TensorNameMap` is. stored: all names of the file."""

    def __init__(self, arch: str, stored: Container[str]):
        self._names = {**_WHOLE, **_BLOCK, **NEWER[arch]}
        self._stored = stored

    def get_name(self, key: str, try_suffixes: tuple[str, ...] = ()) -> str | None:
        """Return the file's name of the module tree's parameter `key`, with the suffix it ends in; None: no name."""
        for suffix in (*try_suffixes, ""):
            stem = key.removesuffix(suffix)
            if suffix and stem == key:
                continue
            layer = _LAYER.fullmatch(stem)
            tails = self._names.get(stem if layer is None else layer[2])
            if tails is None:
                continue
            block = "" if layer is None or tails == _ONCE else f"blk.{layer[1]}."
            names = [f"{block}{one}{suffix}" for one in ((tails,) if isinstance(tails, str) else tails)]
            return next((one for one in names if one in self._stored), names[0])
        return None


def converted_name(name: str) -> str:
    """Return the name under which the converter looks the parameter `name` up in gguf's maps."""
    if ".mixer." in name:
        name = "backbone." + name.removeprefix("model.").removeprefix("backbone.")
        return name.removesuffix(".dt_bias") + ".dt.bias" if name.endswith(".dt_bias") else name
    name = name.replace(".forget_gate.", ".")
    return name.removesuffix(".dt_bias") + ".dt_proj.bias" if name.endswith(".dt_bias") else name
