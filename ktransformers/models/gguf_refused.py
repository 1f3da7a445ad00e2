"""Reasons for which GGUF files of some architectures cannot run, by the name that the file gives.

Together with gguf_families.py this covers every architecture that the `gguf` package knows; a test holds it to that.
"""

from __future__ import annotations

from collections.abc import Container

from ktransformers.errors import UnsupportedError

__all__ = ["REFUSED", "check_architecture"]

_NO_CLASS = "transformers has no class that computes it"
_ENCODER = "it is an encoder: it embeds texts and generates none"
_RECURRENT = "its recurrent layers are not read from GGUF files"
_OWN_ATTENTION = "its class in transformers computes attention by itself, without a cache of ours"
_DIFFUSION = "it generates by diffusion, not token by token"
_IMAGES = "it is the part of a model that reads images; give the file of the language model"
_COMPOSITE = "transformers has no causal class for its text part"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("grok", "baichuan", "refact", "qwen", "plamo", "plamo3", "codeshell", "orion", "internlm2", "xverse"),
            *("arctic", "deepseek", "chatglm", "jais", "exaone", "plm", "smallthinker"),
            *("grovemoe", "pangu-embedded", "maincoder", "openelm"),
        ),
        _NO_CLASS,
    ),
    **dict.fromkeys(
        (
            *("bert", "modern-bert", "nomic-bert", "nomic-bert-moe", "neo-bert", "jina-bert-v2", "jina-bert-v3"),
            *("eurobert", "gemma-embedding", "llama-embed", "t5encoder"),
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        (*("plamo2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"),),
        _RECURRENT,
    ),
    **dict.fromkeys(("falcon", "gptj", "mpt", "bloom"), _OWN_ATTENTION),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("clip", "cogvlm", "chameleon"), _IMAGES),
    **dict.fromkeys(("mistral4", "step35", "deepseek2-ocr", "hunyuan_vl", "paddleocr"), _COMPOSITE),
    **dict.fromkeys(("deepseek41", "kimi-k3"), _NO_CLASS),
    "clef": "it chooses among the options of a schema, and writes no text",
    "wavtokenizer-dec": "it makes sound",
    "minicpm3": "its attention over latents is not read from GGUF files",
    "t5": "it is an encoder-decoder",
    "deci": "its layers differ in shape, some have no attention",
    "dbrx": "its experts have a form of their own in transformers",
    "bitnet": "its converter rounds weights to three values, and transformers rounds while it computes",
    "apertus": "its activations' numbers are metadata, not tensors",
    "gemma3n": "its converter merges and pads tensors of inputs by layer",
}
"""Architecture -> why. Its safetensors may run, where the reason is about GGUF files."""


def check_architecture(arch: str, known: Container[str]) -> None:
    """Raise UnsupportedError, with the reason, for an architecture that is not `known`."""
    if arch in known:
        return
    why = REFUSED.get(arch, "it is not known here")
    raise UnsupportedError(
        f"GGUF files of architecture {arch!r:.60} are not supported: {why}. The model's safetensors files may work."
    )
