"""Reasons for which GGUF files of some architectures cannot run, by the name that the file gives.

Together with families.py this covers every architecture that the `gguf` package knows, to which a test holds it,
and those that llama.cpp and ik_llama.cpp knew in November 2026.
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
_DRAFTS = "it drafts for another model; --draft_model takes gemma4-assistant, and models that run alone"
_ROUNDED = "its converter rounds weights to three values, and transformers rounds while it computes"
_SAFETENSORS = "it is read from safetensors alone; give the published files"
_COMPOSITE = "transformers has no causal class for its text part"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        (
            *("grok", "baichuan", "refact", "qwen", "plamo", "plamo3", "codeshell", "orion", "internlm2", "xverse"),
            *(
                "arctic",
                "deepseek",
                "jais",
                "plm",
                "smallthinker",
                "kimi-k3",
                "maple",
                "nanbeige",
                "spark2_5",
                "talkie",
            ),
            *("grovemoe", "pangu-embedded", "maincoder", "openelm", "openpangu"),
        ),
        _NO_CLASS,
    ),
    "deepseek41": _SAFETENSORS,
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
    **dict.fromkeys(("falcon", "mpt", "bloom", "hrm_text"), _OWN_ATTENTION),
    **dict.fromkeys(("eagle3", "dflash", "dflash-draft", "gemma4_mtp"), _DRAFTS),
    **dict.fromkeys(("wavtokenizer-dec", "qwen3tts", "pockettts"), "it makes sound"),
    **dict.fromkeys(("bitnet", "bitnet-25", "bitnet-b1.58"), _ROUNDED),
    **dict.fromkeys(("dream", "llada", "llada-moe", "rnd1"), _DIFFUSION),
    **dict.fromkeys(("clip", "cogvlm", "chameleon"), _IMAGES),
    **dict.fromkeys(("deepseek2-ocr", "hunyuan_vl", "paddleocr"), _COMPOSITE),
    "gptj": "no converter writes such files",
    "graniteswitch": "it switches adapters at tokens of its own, for which transformers has no class",
    "dots3note": "norms of its latents hold a factor, and latents differ in size from layer to layer",
    "minimax-01": "its linear attention is not read from GGUF files",
    "muse-glimmer": "the scale of its queries is a tensor of norms there, and a number of its config in transformers",
    "clef": "it chooses among the options of a schema, and writes no text",
    "t5": "it is an encoder-decoder",
    "deci": "its layers differ in shape, some have no attention",
    "dbrx": "its experts have a form of their own in transformers",
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
