"""Names of the tensors of `qwen4exp` files, which the gguf package does not know yet.

They are those of llama.cpp's converter, of October 2026. Knows names only; that norms are stored as 1 + weight, and
heads of values in another order, names.py says.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["Qwen4Names", "joined_indexer"]

_OUTSIDE = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.hyper_connection_mixer.hc_norm": "output_hc_norm",
    "model.hyper_connection_mixer.input_mix_weight_down": "output_hc_down",
    "model.hyper_connection_mixer.input_mix_weight_up": "output_hc_up",
}
_STREAMS = {"hc_norm": "norm", "input_mix_weight_down": "down", "input_mix_weight_up": "up"}
_STREAMS |= {"block_inject_weight": "inject"}
_INSIDE = {
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_proj": "ssm_dt",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.indexer.q_layernorm": "indexer.q_norm",
    "self_attn.indexer.k_layernorm": "indexer.k_norm",
    **{f"attn_hyper_connection.{theirs}": f"hc_attn_{ours}" for theirs, ours in _STREAMS.items()},
    **{f"mlp_hyper_connection.{theirs}": f"hc_ffn_{ours}" for theirs, ours in _STREAMS.items()},
    "ple.key_proj": "ple_key",
    "ple.value_proj": "ple_value",
    "ple.conv1d": "ple_conv1d",
    "ple.norm_key": "ple_norm_key",
    "ple.norm_query": "ple_norm_query",
    "ple.norm_conv": "ple_norm_conv",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")
_TABLE = "ple.ple_embedding.ngram_embedding"
"""Of one layer only: files have no number in its name."""


class Qwen4Names:
    """Stands in for gguf.TensorNameMap."""

    def get_name(self, key: str, try_suffixes: Sequence[str] = ()) -> str | None:
        """Return the name in files of a module or parameter, with the first suffix that it ends with; None for what
        files do not have.
        """
        suffix = next((suffix for suffix in try_suffixes if key.endswith(suffix)), "")
        stem = key.removesuffix(suffix)
        found = _LAYER.fullmatch(stem)
        if found is None:
            name = _OUTSIDE.get(stem)
        elif found[2] == _TABLE:
            name = "per_layer_token_embd"
        else:
            inside = _INSIDE.get(found[2])
            name = None if inside is None else f"blk.{found[1]}.{inside}"
        return None if name is None else name + suffix


def joined_indexer(name: str, block: str | None) -> tuple[str, str] | None:
    """Return the tensors that an indexer's one projection is made of, queries first; None for other parameters."""
    if not name.endswith(".indexer.index_qk_proj.weight"):
        return None
    return f"{block}indexer.q_proj.weight", f"{block}indexer.k_proj.weight"
