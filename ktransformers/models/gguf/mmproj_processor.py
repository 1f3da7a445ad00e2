"""transformers' processor of pictures, from the metadata of llama.cpp's projector file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ktransformers.errors import FormatError
from ktransformers.models.gguf.mmproj import PROJECTORS, Vision, projector_of

__all__ = ["MmprojProcessor", "mmproj_processor"]

Values = dict[str, object]


@dataclass(frozen=True, slots=True)
class MmprojProcessor:
    """The processor of a projector file's pictures.

    model_type: of a composite with such a tower. image, text: what preprocessor_config.json and processor_config.json
    would say. position: the token that stands in a prompt for each of a picture's positions. tokens: the others that
    the processor writes. named: what it asks the tokenizer for, and which token that is. stand_in: a token that no text
    has, in the place of `position` where a vocabulary lacks that: the model sees neither.
    """

    model_type: str
    image: Values
    text: Values
    position: str
    tokens: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    stand_in: str | None = None


@dataclass(frozen=True, slots=True)
class _Class:
    """Of a type of projector: the classes of its processors, and their tokens. See MmprojProcessor."""

    image: str
    text: str
    position: str
    tokens: tuple[str, ...] = ()
    named: Mapping[str, str] = field(default_factory=dict)
    stand_in: str | None = None


_QWEN = ("<|vision_start|>", "<|vision_end|>")
_PAD = "<|image_pad|>"
_GLM = ("<|begin_of_image|>", "<|end_of_image|>")
_CLASSES: Mapping[str, _Class] = {
    "qwen2vl_merger": _Class("Qwen2VLImageProcessor", "Qwen2VLProcessor", _PAD, _QWEN),
    "qwen2.5vl_merger": _Class("Qwen2VLImageProcessor", "Qwen2_5_VLProcessor", _PAD, _QWEN),
    "qwen3vl_merger": _Class("Qwen2VLImageProcessor", "Qwen3VLProcessor", _PAD, _QWEN),
    "gemma3": _Class(
        "Gemma3ImageProcessor",
        "Gemma3Processor",
        "<image_soft_token>",
        ("<start_of_image>", "<end_of_image>"),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<unused0>",  # some files list the tokenizer's own 262,144 tokens, behind which it stands
    ),
    "llama4": _Class(
        "Llama4ImageProcessor",
        "Llama4Processor",
        "<|patch|>",
        ("<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    ),
    "pixtral": _Class("PixtralImageProcessor", "PixtralProcessor", "[IMG]", ("[IMG_BREAK]", "[IMG_END]")),
    "internvl": _Class(
        "GotOcr2ImageProcessor",
        "InternVLProcessor",
        "<IMG_CONTEXT>",
        ("<img>", "</img>"),
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",  # which some of its tokenizers lack, and no picture needs
        },
    ),
    "kimik25": _Class("Kimi_K25ImageProcessor", "Kimi_K25Processor", "<|media_pad|>"),
    "glm4v": _Class("Glm46VImageProcessor", "Glm46VProcessor", "<|image|>", _GLM),
    "glm5v": _Class("Glm5NextImageProcessor", "Glm5NextProcessor", "<|image|>", _GLM),
    "idefics3": _Class("Idefics3ImageProcessor", "Idefics3Processor", "<image>", ("<fake_token_around_image>",)),
    "gemma4v": _Class(
        "Gemma4ImageProcessor",
        "Gemma4Processor",
        "<|image|>",
        ("<|image>", "<image|>"),
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",  # which no picture needs, but the processor asks for
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
    ),
    "minimax_m3": _Class(
        "MiniMaxM3VLImageProcessor",
        "MiniMaxM3VLProcessor",
        "]<]image[>[",
        ("]<]start of image[>[", "]<]end of image[>["),
    ),
    "lfm2": _Class(
        "Lfm2VlImageProcessor", "Lfm2VlProcessor", "<image>", ("<|image_start|>", "<|image_end|>", "<|img_thumbnail|>")
    ),
}

_BY_POSITIONS: Mapping[str, tuple[int, int, int]] = {
    **dict.fromkeys(("qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"), (1, 8, 4096)),
    "glm4v": (2, 8, 4096),
    "minimax_m3": (1, 8, 576),
}
"""Processors with bounds of pixels: frames that these count for a picture, and the fewest and the most positions that
llama.cpp takes where the file says nothing."""


def mmproj_processor(metadata: Mapping[str, object]) -> MmprojProcessor:
    """Return the processor of the pictures that a projector file's tower takes.

    metadata: of the file. Raises UnsupportedError for projectors that are not read here, FormatError.
    """
    kind, file = projector_of(metadata), Vision(metadata, {})
    found = _CLASSES[kind]
    image: Values = {
        "image_processor_type": found.image,
        "image_mean": file.array("image_mean") or [0.5] * 3,
        "image_std": file.array("image_std") or [0.5] * 3,
        "do_convert_rgb": True,
        **_image(kind, file),
    }
    text = {"processor_class": found.text, **_text(kind, file)}
    tokens = found.position, found.tokens, found.named, found.stand_in
    return MmprojProcessor(PROJECTORS[kind][0][0], image, text, *tokens)


def _image(kind: str, file: Vision) -> Values:
    """Sizes of pictures."""
    patch, size = file.number("patch_size"), file.number("image_size")
    if kind in _BY_POSITIONS:
        merge = file.number("spatial_merge_size", 2)
        frames, fewest, most = _BY_POSITIONS[kind]
        bounds = _pixels(file, (patch * merge) ** 2, fewest, most)
        edges = {"shortest_edge": frames * bounds[0], "longest_edge": frames * bounds[1]}
        return {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2, "size": edges}
    if kind == "glm5v":
        merge = file.number("spatial_merge_size", 2)
        least, most = (bound // (patch * merge) ** 2 for bound in _pixels(file, (patch * merge) ** 2, 16, 8000))
        counts = {"min_image_tokens": least, "max_image_tokens": most}
        return {"patch_size": patch, "merge_size": merge, "temporal_patch_size": 2, **counts}
    if kind == "pixtral":
        return {"patch_size": patch, "size": {"longest_edge": size}}
    if kind == "kimik25":
        merge = file.number("projector.scale_factor", 2)
        most_patches = _pixels(file, (patch * merge) ** 2)[1] // patch**2  # it makes no picture larger
        return {"patch_size": patch, "merge_size": merge, "max_patches": most_patches}
    if kind == "idefics3":  # without preproc_image_size it is older than tiles
        longest = file.number("preproc_image_size", size)
        return {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": size}}
    if kind == "gemma4v":
        return {"patch_size": patch, "pooling_kernel_size": file.number("projector.scale_factor", 3)}
    if kind == "lfm2":
        return {"encoder_patch_size": patch, "downsample_factor": file.number("projector.scale_factor", 2)}
    values: Values = {"size": {"height": size, "width": size}}
    if kind == "internvl":
        least, most = file.number("preproc_min_tiles", 1), file.number("preproc_max_tiles", 12)
        values |= {"crop_to_patches": True, "min_patches": least, "max_patches": most}
    return values


def _text(kind: str, file: Vision) -> Values:
    """What decides how many positions a picture has, where the image processor's settings do not; and what the
    processor asks for."""
    patch, size = file.number("patch_size"), file.number("image_size")
    if kind == "pixtral":
        return {"patch_size": patch, "spatial_merge_size": file.number("spatial_merge_size", 1)}
    if kind == "llama4":
        return {"patch_size": patch, "pixel_shuffle_ratio": 1.0 / file.number("projector.scale_factor", 2)}
    if kind in ("gemma3", "internvl", "idefics3"):
        scale = file.number("projector.scale_factor", 4 if kind == "gemma3" else 2)
        return {"image_seq_len" if kind == "idefics3" else "image_seq_length": (size // patch // scale) ** 2}
    if kind == "gemma4v":
        return {"feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}}
    return {}


def _pixels(file: Vision, position: int, fewest: int = 8, largest: int = 4096) -> tuple[int, int]:
    """The least and the most pixels of a picture. position: pixels of one. fewest, largest: how many of these llama.cpp
    takes where the file does not say. Raises FormatError."""
    least, most = (file.bound(f"image_{end}_pixels") for end in ("min", "max"))
    if least is not None and most is not None and least > most:
        raise FormatError(f"clip.vision.image_min_pixels is {least}, more than image_max_pixels, {most}")
    few, many = fewest * position, largest * position
    return least or min(few, most or few), most or max(many, least or many)
