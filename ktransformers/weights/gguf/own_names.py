"""Names of tensors in GGUF files of architectures that the `gguf` package does not know, as llama.cpp's converter
writes them (https://github.com/ggml-org/llama.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["OWN_ARCHITECTURES", "own_name"]

_Table = tuple[tuple[re.Pattern[str], str], ...]


def _table(names: Mapping[str, str]) -> _Table:
    """{name of transformers: name in files}, behind "model.layers.N." and "blk.N." or of the whole model."""
    return tuple((re.compile(pattern), stored) for pattern, stored in names.items())


OWN_ARCHITECTURES: Mapping[str, _Table] = {
    "deepseek4": _table(
        {
            r"model\.embed_tokens\.weight": "token_embd.weight",
            r"model\.norm\.weight": "output_norm.weight",
            r"lm_head\.weight": "output.weight",
            r"model\.hc_head\.hc_(fn|base|scale)": r"output_hc_\1.weight",
            r"(attn|ffn)_hc\.(fn|base|scale)": r"hc_\1_\2.weight",
            r"input_layernorm\.weight": "attn_norm.weight",
            r"post_attention_layernorm\.weight": "ffn_norm.weight",
            r"self_attn\.sinks": "attn_sinks.weight",
            r"self_attn\.(q_a|q_b|kv)_proj\.weight": r"attn_\1.weight",
            r"self_attn\.q_a_norm\.weight": "attn_q_a_norm.weight",
            r"self_attn\.kv_norm\.weight": "attn_kv_a_norm.weight",
            r"self_attn\.o_(a|b)_proj\.weight": r"attn_output_\1.weight",
            r"self_attn\.compressor\.(kv|gate)_proj\.weight": r"attn_compressor_\1.weight",
            r"self_attn\.compressor\.position_bias": "attn_compressor_ape.weight",
            r"self_attn\.compressor\.kv_norm\.weight": "attn_compressor_norm.weight",
            r"self_attn\.compressor\.indexer\.q_b_proj\.weight": "indexer.attn_q_b.weight",
            r"self_attn\.compressor\.indexer\.scorer\.weights_proj\.weight": "indexer.proj.weight",
            r"self_attn\.compressor\.indexer\.(kv|gate)_proj\.weight": r"indexer_compressor_\1.weight",
            r"self_attn\.compressor\.indexer\.position_bias": "indexer_compressor_ape.weight",
            r"self_attn\.compressor\.indexer\.kv_norm\.weight": "indexer_compressor_norm.weight",
            r"mlp\.gate\.weight": "ffn_gate_inp.weight",
            r"mlp\.gate\.tid2eid": "ffn_gate_tid2eid.weight",
            r"mlp\.gate\.e_score_correction_bias": "exp_probs_b.bias",
            r"mlp\.shared_experts\.(gate|up|down)_proj\.weight": r"ffn_\1_shexp.weight",
        }
    ),
}
"""Experts are found by their names in all architectures, see weights/gguf/source.py."""

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def own_name(arch: str, name: str) -> str | None:
    """Return the name in files of `arch` of the parameter or buffer `name`, None for one that they do not have."""
    layer = _LAYER.match(name)
    block, rest = ("", name) if layer is None else (f"blk.{layer[1]}.", name[layer.end() :])
    for pattern, stored in OWN_ARCHITECTURES[arch]:
        found = pattern.fullmatch(rest)
        if found is not None:
            return block + found.expand(stored)
    return None
