"""Ollama's gpt-oss, a GGUF file of architecture "gptoss", under llama.cpp's names. Reads no bytes.

    gptoss.KEY                 gpt-oss.KEY
    blk.N.attn_out.*           blk.N.attn_output.*
    blk.N.attn_sinks           blk.N.attn_sinks.weight
    blk.N.ffn_norm.weight      blk.N.post_attention_norm.weight

It does not say that its rotation is scaled by YaRN, nor the rule that cuts text into words, or names "default" for it;
of gpt-oss both are known. What its blocks hold is the same. Source: Ollama's convert/convert_gptoss.go and
llama/compat/llama-ollama-compat.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ktransformers.errors import FormatError

__all__ = ["ARCHITECTURE", "SAID", "renamed_key", "renamed_tensor"]

ARCHITECTURE = "gptoss"

SAID: Mapping[str, str] = {
    "general.architecture": "gpt-oss",
    "gpt-oss.rope.scaling.type": "yarn",
    "tokenizer.ggml.pre": "gpt-4o",
}
"""What holds of every such file, whatever it says: metadata under llama.cpp's keys, all of them strings."""

_TENSORS = (
    (re.compile(r"(blk\.\d+)\.attn_out(\..+)"), r"\1.attn_output\2"),
    (re.compile(r"(blk\.\d+)\.attn_sinks"), r"\1.attn_sinks.weight"),
    (re.compile(r"(blk\.\d+)\.ffn_norm(\..+)"), r"\1.post_attention_norm\2"),
)


def renamed_key(key: str) -> str:
    """Return llama.cpp's name of a metadata key."""
    prefix = f"{ARCHITECTURE}."
    return f"gpt-oss.{key.removeprefix(prefix)}" if key.startswith(prefix) else key


def renamed_tensor(name: str) -> str:
    """Return llama.cpp's name of a tensor.

    Raises FormatError for gate and up in one tensor, whose rows Ollama's converter once left in turn.
    """
    if "ffn_gate_up_exps" in name:
        raise FormatError(
            f"tensor {name!r:.80} of architecture {ARCHITECTURE!r} has gate and up in one, as Ollama wrote it for a "
            "while; `ollama pull` the model again, or take a file that llama.cpp's converter made"
        )
    for pattern, new in _TENSORS:
        if pattern.fullmatch(name):
            return pattern.sub(new, name)
    return name
