"""Towers that Ollama's converter keeps in the model's own GGUF, as llama.cpp's projector file has them. Reads no bytes.

    ARCH.vision.KEY             clip.vision.KEY
    v.patch_embedding.weight    v.patch_embd.weight
    v.blk.N.layer_norm1.*       v.blk.N.ln1.*            and others, by the architecture

What its blocks hold is the same, but that Mistral's queries and keys are in the order of the original. Source: Ollama's
convert/ and llama/compat/llama-ollama-compat.cpp.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from ktransformers.errors import FormatError, UnsupportedError

__all__ = ["QWEN2VL", "QWEN25VL", "has_tower", "projector_metadata", "projector_name", "renamed_key"]

QWEN25VL, QWEN2VL = "qwen25vl", "qwen2vl"
"""What Ollama calls an architecture that llama.cpp knows by the other name."""

Metadata = Mapping[str, object]
Shapes = Mapping[str, tuple[int, ...]]
_Values = dict[str, object]

_HALF = [0.5] * 3
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_BLOCK = r"(v\.blk\.\d+\.)"
_END = r"(\.weight|\.bias)"


@dataclass(frozen=True, slots=True)
class _Tower:
    """Of an architecture. projector: llama.cpp's name of its type. act: clip's key of its activation. names: patterns
    of tensors and llama.cpp's names, the first that matches counts; all others are the same. more: what else its
    projector file says, keys of clip.vision."""

    projector: str
    act: str
    names: tuple[tuple[str, str], ...]
    more: Callable[[_File], _Values]
    mean: list[float]
    std: list[float]


@dataclass(frozen=True, slots=True)
class _File:
    """Checked access to the metadata of one architecture. Every method raises FormatError."""

    architecture: str
    metadata: Metadata
    shapes: Shapes

    def number(self, key: str, usual: int | None = None) -> int:
        value = self.metadata.get(f"{self.architecture}.{key}", usual)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise FormatError(f"{self.architecture}.{key} is {value!r:.40}, and must be a number above 0")
        return value

    def numbers(self, key: str) -> list[int]:
        value = np.asarray(self.metadata.get(f"{self.architecture}.{key}", ()))
        if value.ndim != 1 or (value.size and value.dtype.kind not in "iu"):
            raise FormatError(f"{self.architecture}.{key} must be a list of whole numbers")
        return [int(one) for one in value]

    def rows(self, *names: str) -> int:
        """The rows of the first of these tensors that is there."""
        for name in names:
            if len(self.shapes.get(name, ())) == 2:
                return self.shapes[name][0]
        raise FormatError(f"the file has no {names[0]}")


def _gemma3(file: _File) -> _Values:
    side = file.number("vision.image_size") // file.number("vision.patch_size")
    return {"projector.scale_factor": side // max(math.isqrt(file.number("mm.tokens_per_image", 256)), 1)}


def _qwen25vl(file: _File) -> _Values:
    full = file.numbers("vision.fullatt_block_indexes")
    inner = file.rows("v.blk.0.ffn_up.weight")
    return {"feed_forward_length": inner, "n_wa_pattern": full[0] + 1 if full else 8, "image_size": 560}


def _qwen3vl(file: _File) -> _Values:
    taken = file.numbers("vision.deepstack_visual_indexes")
    positions = file.rows("v.position_embd.weight", "v.pos_embed.weight")
    found: _Values = {
        "feed_forward_length": file.rows("v.blk.0.ffn_up.weight", "v.blk.0.mlp.linear_fc1.weight"),
        "image_size": math.isqrt(positions) * file.number("vision.patch_size"),
        "is_deepstack_layers": [index in taken for index in range(file.number("vision.block_count"))],
    }
    edges = {"min": "vision.shortest_edge", "max": "vision.longest_edge"}
    said = {end: key for end, key in edges.items() if file.metadata.get(f"{file.architecture}.{key}")}
    return found | {f"image_{end}_pixels": file.number(key) for end, key in said.items()}


def _llama4(file: _File) -> _Values:
    prefix = f"{file.architecture}.vision"
    ratio = file.metadata.get(f"{prefix}.pixel_shuffle_ratio", 0.5)
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise FormatError(f"{prefix}.pixel_shuffle_ratio is {ratio!r:.40}, and must be a number from 0 to 1")
    eps = file.metadata.get(f"{prefix}.layer_norm_epsilon", 1e-5)
    return {"projector.scale_factor": round(1 / ratio), "attention.layer_norm_epsilon": eps}


def _mistral3(file: _File) -> _Values:
    return {"spatial_merge_size": file.number("spatial_merge_size", 1)}


_OF_QWEN3 = (
    (r"v\.(?:pos_embed|position_embd)" + _END, r"v.position_embd\1"),
    (r"v\.patch_emb(?:ed|d)" + _END, r"v.patch_embd\1"),
    (r"v\.merger\.norm" + _END, r"v.post_ln\1"),
    (r"v\.merger\.linear_fc1" + _END, r"mm.0\1"),
    (r"v\.merger\.linear_fc2" + _END, r"mm.2\1"),
    (_BLOCK + r"mlp\.linear_fc1" + _END, r"\1ffn_up\2"),
    (_BLOCK + r"mlp\.linear_fc2" + _END, r"\1ffn_down\2"),
    (_BLOCK + r"norm([12])" + _END, r"\1ln\2\3"),
)
_QWEN3 = _Tower("qwen3vl_merger", "use_gelu", _OF_QWEN3, _qwen3vl, _HALF, _HALF)
_DEEPSTACK = re.compile(r"v\.deepstack\.(\d{1,9})\.(?:linear_)?(norm|fc1|fc2)" + _END)

_TOWERS: Mapping[str, _Tower] = {
    "gemma3": _Tower(
        "gemma3",
        "use_gelu",
        (
            (r"v\.patch_embedding" + _END, r"v.patch_embd\1"),
            (r"v\.position_embedding" + _END, r"v.position_embd\1"),
            (r"v\.post_layernorm" + _END, r"v.post_ln\1"),
            (_BLOCK + r"layer_norm([12])" + _END, r"\1ln\2\3"),
            (_BLOCK + r"attn_output" + _END, r"\1attn_out\2"),
            (_BLOCK + r"mlp\.fc1" + _END, r"\1ffn_up\2"),
            (_BLOCK + r"mlp\.fc2" + _END, r"\1ffn_down\2"),
            (r"mm\.mm_(input_projection|soft_emb_norm)" + _END, r"mm.\1\2"),
        ),
        _gemma3,
        _HALF,
        _HALF,
    ),
    QWEN2VL: _Tower(
        "qwen2.5vl_merger",
        "use_silu",
        (
            (r"v\.merger\.ln_q" + _END, r"v.post_ln\1"),
            (r"v\.merger\.mlp\.([02])" + _END, r"mm.\1\2"),
            (r"v\.patch_embd_0\.weight", "v.patch_embd.weight"),
            (r"v\.patch_embd_1\.weight", "v.patch_embd.weight.1"),
        ),
        _qwen25vl,
        _CLIP_MEAN,
        _CLIP_STD,
    ),
    "qwen3vl": _QWEN3,
    "qwen3vlmoe": _QWEN3,
    "llama4": _Tower(
        "llama4",
        "use_gelu",
        (
            (r"v\.vision_adapter\.mlp\.fc([12])" + _END, r"mm.model.mlp.\1\2"),
            (r"mm\.linear_1" + _END, r"mm.model.fc\1"),
            (r"v\.positional_embedding_vlm", "v.position_embd.weight"),
            (r"v\.class_embedding", "v.class_embd"),
            (r"v\.layernorm_post" + _END, r"v.post_ln\1"),
            (r"v\.layernorm_pre" + _END, r"v.pre_ln\1"),
            (r"v\.patch_embedding" + _END, r"v.patch_embd\1"),
            (_BLOCK + r"attn_output" + _END, r"\1attn_out\2"),
            (_BLOCK + r"attn_norm" + _END, r"\1ln1\2"),
            (_BLOCK + r"ffn_norm" + _END, r"\1ln2\2"),
            (_BLOCK + r"mlp\.fc1" + _END, r"\1ffn_up\2"),
            (_BLOCK + r"mlp\.fc2" + _END, r"\1ffn_down\2"),
        ),
        _llama4,
        _HALF,
        _HALF,
    ),
    "mistral3": _Tower(
        "pixtral",
        "use_silu",
        (
            (r"v\.patch_conv" + _END, r"v.patch_embd\1"),
            (r"v\.encoder_norm" + _END, r"v.pre_ln\1"),
            (_BLOCK + r"attn_output" + _END, r"\1attn_out\2"),
            (_BLOCK + r"attn_norm" + _END, r"\1ln1\2"),
            (_BLOCK + r"ffn_norm" + _END, r"\1ln2\2"),
            (r"mm\.linear_([12])" + _END, r"mm.\1\2"),
            (r"mm\.patch_merger\.merging_layer" + _END, r"mm.patch_merger\1"),
            (r"mm\.norm" + _END, r"mm.input_norm\1"),
        ),
        _mistral3,
        _CLIP_MEAN,
        _CLIP_STD,
    ),
}


def has_tower(names: Iterable[str]) -> bool:
    """Whether a model's file holds tensors of a tower."""
    return any(name.startswith("v.blk.") for name in names)


def projector_metadata(architecture: str, metadata: Metadata, shapes: Shapes) -> dict[str, object]:
    """Return what the projector file of such a model would say. metadata: of the model's file. shapes: of its tensors.

    Raises UnsupportedError for an architecture whose tower is not read here, FormatError for wrong values.
    """
    if architecture not in _TOWERS:
        raise UnsupportedError(
            f"the tower for pictures in it, as Ollama's converter keeps it, is not read for {architecture!r:.40}, only "
            f"for {QWEN25VL}, {', '.join(name for name in _TOWERS if name != QWEN2VL)}. llama.cpp's projector file "
            "beside it is read"
        )
    tower, file = _TOWERS[architecture], _File(architecture, metadata, shapes)
    prefix = f"{architecture}.vision."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    usual: _Values = {"image_mean": tower.mean, "image_std": tower.std}
    values = {**usual, **own, **tower.more(file), "projection_dim": file.number("embedding_length")}
    return {
        "clip.projector_type": tower.projector,
        f"clip.{tower.act}": True,
        **{f"clip.vision.{key}": value for key, value in values.items()},
    }


def projector_name(architecture: str, name: str, metadata: Metadata) -> str | None:
    """Return llama.cpp's name of a tensor of the tower; None of one of the language model. metadata, errors: as
    above."""
    if not name.startswith(("v.", "mm.")):
        return None
    deep = _DEEPSTACK.fullmatch(name)
    if deep is not None:
        taken = _File(architecture, metadata, {}).numbers("vision.deepstack_visual_indexes")
        number = int(deep[1])
        return f"v.deepstack.{taken[number]}.{deep[2]}{deep[3]}" if number < len(taken) else name
    for pattern, new in _TOWERS[architecture].names:
        if re.fullmatch(pattern, name):
            return re.sub(pattern, new, name)
    return name


def renamed_key(key: str) -> str:
    """Return llama.cpp's name of a metadata key of QWEN25VL."""
    if key == f"{QWEN25VL}.rope.mrope_section":
        return f"{QWEN2VL}.rope.dimension_sections"
    prefix = f"{QWEN25VL}."
    return f"{QWEN2VL}.{key.removeprefix(prefix)}" if key.startswith(prefix) else key
