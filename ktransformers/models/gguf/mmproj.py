"""The config of a composite from the metadata of llama.cpp's projector file.

The language model's part comes from its own GGUF; the file beside it has keys `clip.vision.*`. Projectors whose every
tensor has a place here are in one table; others are refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
from transformers import CONFIG_MAPPING, PretrainedConfig

from ktransformers.errors import FormatError, UnsupportedError, reason_of

__all__ = ["PROJECTORS", "Vision", "composite_from_mmproj", "projector_of"]

Values = dict[str, object]
Shapes = Mapping[str, tuple[int, ...]]


class Vision:
    """Checked access to the keys of one file, and the shapes of its tensors. Keys without `clip.vision.`; every method
    raises FormatError for what is not there or of another kind."""

    def __init__(self, metadata: Mapping[str, object], shapes: Shapes):
        self.metadata, self.shapes = metadata, shapes

    def number(self, key: str, usual: int | None = None) -> int:
        """Return a whole number above 0. usual: where the file says nothing."""
        value = self.metadata.get(f"clip.vision.{key}", usual)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise FormatError(f"clip.vision.{key} is {value!r:.40}, and must be a number above 0")
        return value

    def bound(self, key: str) -> int | None:
        """Return a whole number above 0; None where the file says nothing, or 0."""
        return self.number(key) if self.metadata.get(f"clip.vision.{key}") else None

    def real(self, key: str, usual: float) -> float:
        """Return a number. usual: where the file says nothing."""
        value = self.metadata.get(f"clip.vision.{key}", usual)
        if not isinstance(value, float):
            raise FormatError(f"clip.vision.{key} is {value!r:.40}, and must be a number")
        return value

    def array(self, key: str) -> list[float]:
        """Return the numbers of an array; none where the file says nothing."""
        found: list[float] = np.asarray(self.metadata.get(f"clip.vision.{key}", ())).ravel().tolist()
        return found

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        if name not in self.shapes:
            raise FormatError(f"the projector file has no {name}")
        return tuple(self.shapes[name])

    def act(self, usual: str) -> str:
        """Return the name of the activation."""
        if self.metadata.get("clip.use_silu"):
            return "silu"
        return "gelu" if self.metadata.get("clip.use_gelu") else usual

    @property
    def common(self) -> Values:
        """What towers of most families call by the same names."""
        return {
            "hidden_size": self.number("embedding_length"),
            "intermediate_size": self.number("feed_forward_length"),
            "num_hidden_layers": self.number("block_count"),
            "num_attention_heads": self.number("attention.head_count"),
            "patch_size": self.number("patch_size"),
        }

    @property
    def of_qwen(self) -> Values:
        """The same by the names of Qwen's."""
        return {
            "depth": self.number("block_count"),
            "num_heads": self.number("attention.head_count"),
            "patch_size": self.number("patch_size"),
            "spatial_merge_size": self.number("spatial_merge_size", 2),
        }


def _qwen2vl(file: Vision) -> tuple[Values, Values]:
    width = file.number("embedding_length")
    inner = math.prod(file.shape("v.blk.0.ffn_up.bias"))
    if inner == width:  # older converters wrote the two under each other's names
        inner = math.prod(file.shape("v.blk.0.ffn_down.bias"))
    ratio = inner // width if inner % width == 0 else inner / width
    vision = {**file.of_qwen, "embed_dim": width, "mlp_ratio": ratio}
    return {**vision, "hidden_size": file.number("projection_dim")}, {}


def _qwen25vl(file: Vision) -> tuple[Values, Values]:
    step, depth = file.number("n_wa_pattern"), file.number("block_count")
    return {
        **file.of_qwen,
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.number("feed_forward_length"),
        "out_hidden_size": file.number("projection_dim"),
        "window_size": file.number("window_size", 112),
        "fullatt_block_indexes": list(range(step - 1, depth, step)),
    }, {}


def _qwen3vl(file: Vision) -> tuple[Values, Values]:
    marks = file.array("is_deepstack_layers")
    return {
        **file.of_qwen,
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.number("feed_forward_length"),
        "out_hidden_size": file.number("projection_dim"),
        "num_position_embeddings": file.shape("v.position_embd.weight")[0],
        "deepstack_visual_indexes": [index for index, is_taken in enumerate(marks) if is_taken],
    }, {}


def _gemma3(file: Vision) -> tuple[Values, Values]:
    size, patch = file.number("image_size"), file.number("patch_size")
    side = size // patch // file.number("projector.scale_factor", 4)
    vision = {**file.common, "image_size": size, "vision_use_head": False}
    return {**vision, "layer_norm_eps": file.real("attention.layer_norm_epsilon", 1e-6)}, {
        "mm_tokens_per_image": side**2
    }


def _llama4(file: Vision) -> tuple[Values, Values]:
    inner = file.shape("mm.model.mlp.1.weight")[0]
    return {
        **file.common,
        "image_size": file.number("image_size"),
        "norm_eps": file.real("attention.layer_norm_epsilon", 1e-5),
        "pixel_shuffle_ratio": 1.0 / file.number("projector.scale_factor", 2),
        "projector_input_dim": inner,
        "projector_output_dim": file.shape("mm.model.mlp.2.weight")[0],
        "vision_output_dim": file.shape("mm.model.fc.weight")[1],
    }, {}


def _pixtral(file: Vision) -> tuple[Values, Values]:
    vision = {**file.common, "image_size": file.number("image_size"), "hidden_act": file.act("gelu")}
    vision["head_dim"] = file.number("embedding_length") // file.number("attention.head_count")
    whole = {"spatial_merge_size": file.number("spatial_merge_size", 1)}
    return vision, {**whole, "multimodal_projector_bias": "mm.1.bias" in file.shapes, "vision_feature_layer": -1}


def _internvl(file: Vision) -> tuple[Values, Values]:
    sides = {key: [file.number(key)] * 2 for key in ("image_size", "patch_size")}
    return {
        **file.common,
        **sides,
        "hidden_act": file.act("gelu"),
        "layer_norm_eps": file.real("attention.layer_norm_epsilon", 1e-6),
        "attention_bias": "v.blk.0.attn_q.bias" in file.shapes,
        "use_qk_norm": "v.blk.0.attn_q_norm.weight" in file.shapes,
        "norm_type": "layer_norm" if "v.blk.0.ln1.bias" in file.shapes else "rms_norm",
    }, {"downsample_ratio": 1.0 / file.number("projector.scale_factor", 2)}


def _kimik25(file: Vision) -> tuple[Values, Values]:
    merge = file.number("projector.scale_factor", 2)
    side = math.isqrt(math.prod(file.shape("v.position_embd.weight")) // file.number("embedding_length"))
    vision = {**file.common, "pos_emb_height": side, "pos_emb_width": side, "merge_kernel_size": [merge, merge]}
    return vision, {
        "projection_hidden_size": file.shape("mm.input_norm.weight")[0],
        "projection_layer_norm_eps": file.real("attention.layer_norm_epsilon", 1e-5),
    }


def _glm4v(file: Vision) -> tuple[Values, Values]:
    return {
        **file.of_qwen,
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.shape("mm.up.weight")[0],
        "out_hidden_size": file.shape("v.blk.0.ffn_up.weight")[0],  # its blocks are as wide as the language model
        "image_size": file.number("image_size"),
        "attention_bias": "v.blk.0.attn_qkv.bias" in file.shapes,
        "rms_norm_eps": file.real("attention.layer_norm_epsilon", 1e-5),
        "hidden_act": file.act("silu"),
    }, {}


def _glm5v(file: Vision) -> tuple[Values, Values]:
    return {
        **file.of_qwen,
        "hidden_size": file.number("embedding_length"),
        "intermediate_size": file.number("feed_forward_length"),
        "projection_intermediate_size": file.shape("mm.up.weight")[0],
        "out_hidden_size": file.number("projection_dim"),
        "image_size": file.number("image_size"),
        "attention_bias": "v.blk.0.attn_qkv.bias" in file.shapes,
        "rms_norm_eps": file.real("attention.layer_norm_epsilon", 1e-5),
        "swiglu_limit": file.real("swiglu_clamp", 10.0),
        "hidden_act": file.act("silu"),
    }, {}


def _idefics3(file: Vision) -> tuple[Values, Values]:
    size, eps = file.number("image_size"), file.real("attention.layer_norm_epsilon", 1e-6)
    vision = {**file.common, "image_size": size, "layer_norm_eps": eps}
    return vision, {"scale_factor": file.number("projector.scale_factor", 2)}


def _gemma4v(file: Vision) -> tuple[Values, Values]:
    head = math.prod(file.shape("v.blk.0.attn_q_norm.weight"))
    return {
        **file.common,
        "model_type": "gemma4_vision",
        "head_dim": head,
        "num_key_value_heads": file.shape("v.blk.0.attn_k.weight")[0] // head,
        "position_embedding_size": file.shape("v.position_embd.weight")[1],
        "pooling_kernel_size": file.number("projector.scale_factor", 3),
        "rms_norm_eps": file.real("attention.layer_norm_epsilon", 1e-6),
        "use_clipped_linears": any(name.endswith(".input_max") for name in file.shapes if name.startswith("v.")),
        "standardize": "v.std_scale" in file.shapes,
    }, {"audio_config": None}


def _minimax_m3(file: Vision) -> tuple[Values, Values]:
    return {
        **file.common,
        "image_size": file.number("image_size"),
        "layer_norm_eps": file.real("attention.layer_norm_epsilon", 1e-5),
        "spatial_merge_size": file.number("spatial_merge_size", 2),
    }, {"projector_hidden_size": file.shape("mm.1.weight")[0]}


def _lfm2(file: Vision) -> tuple[Values, Values]:
    return {
        **file.common,
        "num_patches": file.shape("v.position_embd.weight")[0],
        "layer_norm_eps": file.real("attention.layer_norm_epsilon", 1e-6),
        "vision_use_head": False,
    }, {
        "downsample_factor": file.number("projector.scale_factor", 2),
        "projector_hidden_size": file.shape("mm.1.weight")[0],
        "projector_bias": "mm.1.bias" in file.shapes,
        "projector_use_layernorm": "mm.input_norm.weight" in file.shapes,
    }


_Read = Callable[[Vision], tuple[Values, Values]]

PROJECTORS: Mapping[str, tuple[tuple[str, ...], _Read]] = {
    "qwen2vl_merger": (("qwen2_vl",), _qwen2vl),
    "qwen2.5vl_merger": (("qwen2_5_vl",), _qwen25vl),
    "qwen3vl_merger": (("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "qwen4_exp"), _qwen3vl),
    "gemma3": (("gemma3",), _gemma3),
    "llama4": (("llama4",), _llama4),
    "pixtral": (("mistral3",), _pixtral),
    "internvl": (("internvl",), _internvl),
    "kimik25": (("kimi_k25",), _kimik25),
    "glm4v": (("glm4v_moe",), _glm4v),
    "glm5v": (("glm5_next",), _glm5v),
    "idefics3": (("idefics3",), _idefics3),
    "gemma4v": (("gemma4",), _gemma4v),
    "minimax_m3": (("minimax_m3_vl",), _minimax_m3),
    "lfm2": (("lfm2_vl",), _lfm2),
}
"""By the type that the file names: model types of composites with such a tower, and what reads its config."""

_OF_SOUND = frozenset(
    {
        *("gemma3na", "gemma4a", "gemma4ua", "ultravox", "qwen2a", "qwen3a", "glma", "voxtral", "meralion"),
        *("musicflamingo", "lfm2a", "granite_speech", "mimo_audio", "parakeet", "dots3note_a", "qwen3tts_spkenc"),
        *("qwen3tts_gen", "pockettts_spkenc", "pockettts_gen"),
    }
)
"""Types of llama.cpp's that take or make sound alone."""

_TEXTS = {
    "qwen2": ("qwen2_vl", "qwen2_5_vl"),
    "qwen3": ("qwen3_vl",),
    "qwen3_moe": ("qwen3_vl_moe",),
    "glm4_moe": ("glm4v_moe",),
}
"""Text configs that a GGUF is read as where no pictures come, of composites whose own one knows them."""

_ANY_TEXT = ("mistral3", "internvl", "kimi_k25", "idefics3", "lfm2_vl")
"""Composites whose language model may be of several types."""


def projector_of(metadata: Mapping[str, object]) -> str:
    """Return the type of a projector file. Raises UnsupportedError for one that is not read here."""
    found = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if found is None:
        if metadata.get("clip.audio.projector_type"):
            raise UnsupportedError("it is a projector for sound, which no model takes here")
        kind = f"a model of {metadata.get('general.architecture', 'an unknown kind')!s:.40}"
        raise UnsupportedError(f"it holds {kind}, not a projector for pictures; llama.cpp's are called mmproj-*.gguf")
    if found in _OF_SOUND:
        raise UnsupportedError(f"projectors of type {found!r} are for sound, which no model takes here")
    if found not in PROJECTORS:
        raise UnsupportedError(
            f"projectors of type {found!r:.40} are not read here; {', '.join(PROJECTORS)} are. The model's folder of "
            "safetensors has its tower in a form that is"
        )
    return str(found)


def composite_from_mmproj(
    metadata: Mapping[str, object], shapes: Shapes, text: PretrainedConfig, sections: list[int] | None = None
) -> PretrainedConfig:
    """Return the config of the composite that a language model and a projector file make. It has the language model's
    config in the form that knows pictures.

    shapes: of the file's tensors. text: the language model's. sections: rope.dimension_sections of its GGUF. Raises
    UnsupportedError for projectors that are not read here, FormatError for metadata that make no config.
    """
    kinds, read = PROJECTORS[projector_of(metadata)]
    vision, whole = read(Vision(metadata, shapes))
    kind, values = _fitting(kinds, text, sections)
    if kind.startswith(("qwen3_5", "qwen4")):
        vision.pop("deepstack_visual_indexes", None)
    try:
        config: PretrainedConfig = CONFIG_MAPPING[kind](
            text_config=values, vision_config=vision, tie_word_embeddings=text.tie_word_embeddings, **whole
        )
    except Exception as error:  # whatever a config class does with values that do not fit each other
        raise FormatError(f"the projector file's metadata make no valid {kind} config: {reason_of(error)}") from error
    width = Vision(metadata, shapes).number("projection_dim", config.get_text_config().hidden_size)
    if width != config.get_text_config().hidden_size:
        raise FormatError(
            f"the projector file is of a model that is {width} wide, and this one is "
            f"{config.get_text_config().hidden_size}; it belongs to another model"
        )
    return config


def _fitting(kinds: tuple[str, ...], text: PretrainedConfig, sections: list[int] | None) -> tuple[str, Values]:
    """The model type of the composite that a text config is of, and the text config's values there."""
    values = text.to_dict()
    for kind in kinds:
        if kind in _TEXTS.get(text.model_type, ()):
            if not sections:
                raise FormatError("the language model's GGUF has no rope.dimension_sections, and pictures need them")
            rope = {**(values.get("rope_parameters") or {}), "mrope_section": sections[:3]}
            if kind.startswith("qwen3"):
                rope["mrope_interleaved"] = True
            return kind, {**values, "model_type": f"{kind}_text", "rope_parameters": rope}
    for kind in kinds:
        if kind in _ANY_TEXT or text.model_type in (kind, f"{kind}_text"):
            if kind == "gemma4" and not values.get("hidden_size_per_layer_input"):  # all but E2B and E4B, as published
                values["use_bidirectional_attention"] = "vision"
            return kind, values
    raise UnsupportedError(
        f"the projector file is of {', '.join(kinds)}, and the language model is a {text.model_type}; they do not "
        "belong together"
    )
