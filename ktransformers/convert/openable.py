"""Checks whether llama.cpp opens a file with these tensors: what its loader takes, for each architecture that is
written.

It refuses a file that lacks a tensor it asks for, and one with a tensor that it does not ask for. What it asks for is
here (llama.cpp's src/models); which names a converter uses is in weights/gguf/names.py. Knows no file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ktransformers.errors import UnsupportedError

__all__ = ["check_opens"]

_QKV = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
_ATTENTION = (*_QKV, "attn_output.bias")
_DENSE_MLP = ("ffn_gate.bias", "ffn_up.bias", "ffn_down.bias")
_ROUTER = ("exp_probs_b.bias",)
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ALL_ROUTED = ("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")


@dataclass(frozen=True, slots=True)
class _Loader:
    """What llama.cpp's loader of one architecture does.

    may: biases and factors that it takes; any other is a tensor too many. every: what each layer must have. must: what
    the model must have. equal_heads: queries and keys have the same number of heads. plain_heads: heads are as wide as
    embeddings divided by their number.
    """

    may: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    must: tuple[str, ...] = ()
    equal_heads: bool = False
    plain_heads: bool = False


_HEAD = ("output.weight",)
_LOADERS: Mapping[str, _Loader] = {
    "llama": _Loader((*_ATTENTION, *_DENSE_MLP, *_FACTORS)),
    "qwen2": _Loader((*_QKV, "output.bias"), plain_heads=True),
    "qwen3": _Loader(_QKV),
    "qwen2moe": _Loader(_QKV, (*_ALL_ROUTED, "ffn_gate_inp_shexp.weight"), _HEAD, plain_heads=True),
    "qwen3moe": _Loader(_QKV, _ALL_ROUTED),
    "deepseek2": _Loader(_ROUTER),
    "dots1": _Loader((*_QKV, *_ROUTER), must=_HEAD, equal_heads=True),
    "ernie4_5-moe": _Loader((*_ATTENTION, *_ROUTER)),  # and _check_ernie
    "glm4moe": _Loader((*_QKV, *_ROUTER)),
    "gpt-oss": _Loader(
        (*_ATTENTION, "ffn_gate_inp.bias", "ffn_gate_exps.bias", "ffn_up_exps.bias", "ffn_down_exps.bias"),
        ("attn_output.bias",),
        _HEAD,
    ),
    "granitemoe": _Loader((*_ATTENTION, *_DENSE_MLP, *_FACTORS)),
    "hunyuan-moe": _Loader(_QKV, (*_ALL_ROUTED, "ffn_up_shexp.weight", "attn_q_norm.weight")),
    "minimax-m2": _Loader((*_QKV, *_ROUTER), _ALL_ROUTED, _HEAD),
    "olmoe": _Loader(_QKV, _ALL_ROUTED, _HEAD, equal_heads=True, plain_heads=True),
    "phimoe": _Loader(
        (*_ATTENTION, "attn_norm.bias", "ffn_norm.bias", "output_norm.bias", "output.bias", *_FACTORS[1:]),
        (*_ALL_ROUTED, "attn_output.bias"),
        (*_HEAD, "output.bias"),
        plain_heads=True,
    ),
}
_LITE_LAYERS = (26, 27)
"""Layers of the deepseek2 files in which llama.cpp expects queries without a latent."""


def check_opens(arch: str, metadata: Mapping[str, object], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise UnsupportedError, naming a tensor or a key, where llama.cpp could not open such a file.

    metadata: by whole key; shapes: of all tensors, in torch order. Architectures that this program does not write pass.
    """
    loader = _LOADERS.get(arch)
    if loader is None:
        return
    tails = {name: re.sub(r"^blk\.\d+\.", "", name) for name in shapes}
    extra = [name for name, tail in tails.items() if _is_optional(tail) and tail not in loader.may]
    layers = _count(metadata, f"{arch}.block_count")
    wanted = [f"blk.{layer}.{tail}" for layer in range(layers) for tail in loader.every]
    missing = [name for name in (*loader.must, *wanted) if name not in shapes]
    if extra or missing:
        what = f"does not read {extra[0]}" if extra else f"asks for {missing[0]}, which this model does not have"
        raise UnsupportedError(
            f"this model cannot be written as GGUF: llama.cpp opens no {arch} file with such tensors, it {what}. The "
            "safetensors run here as they are"
        )
    _check_shape(arch, metadata, loader)


def _is_optional(tail: str) -> bool:
    return tail.endswith(".bias") or tail in _FACTORS


def _count(metadata: Mapping[str, object], key: str) -> int:
    value = metadata.get(key, 0)
    return value if isinstance(value, int) else 0


def _check_shape(arch: str, metadata: Mapping[str, object], loader: _Loader) -> None:
    heads = _count(metadata, f"{arch}.attention.head_count")
    kv_heads = _count(metadata, f"{arch}.attention.head_count_kv")
    width, size = _count(metadata, f"{arch}.embedding_length"), _count(metadata, f"{arch}.attention.key_length")
    groups, used = (_count(metadata, f"{arch}.expert_group_{one}") for one in ("count", "used_count"))
    lite = _count(metadata, f"{arch}.block_count") in _LITE_LAYERS
    said = {
        f"{kv_heads} heads of keys for {heads} of queries": loader.equal_heads and heads != kv_heads,
        f"heads of {size} where embeddings of {width} are shared by {heads}": (
            loader.plain_heads and bool(size) and size * heads != width
        ),
        f"{used} of {groups} groups of experts": groups > 1 and used >= groups,
        "queries without a latent, but in models of 26 or 27 layers": (
            arch == "deepseek2" and f"{arch}.attention.q_lora_rank" not in metadata and not lite
        ),
        "queries with a latent in models of 26 or 27 layers": (
            arch == "deepseek2" and f"{arch}.attention.q_lora_rank" in metadata and lite
        ),
    }
    reason = next((one for one, is_so in said.items() if is_so), None)
    if reason is not None:
        raise UnsupportedError(
            f"this model cannot be written as GGUF: llama.cpp opens no {arch} file with {reason}. The safetensors run "
            "here as they are"
        )
