"""Folders of models that read pictures, without weights: config, processor, chat template, a tokenizer of bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from ktransformers.media.decoding import decode
from ktransformers.media.picture import ReadPicture
from ktransformers.media.processing import Processor

__all__ = ["FAMILIES", "TORCHVISION_FAMILIES", "LocalReader", "PictureFamily", "write_folder"]

_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'PICTURE' -}}{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""As Qwen's: parts in their order."""

GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<start_of_turn>' + message.role + '\\n' -}}
{%- if message.content is string -%}{{- message.content | trim -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'PICTURE' -}}{%- elif part.type == 'text' -%}{{- part.text | trim -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
"""As Gemma's: texts are trimmed."""

LLAVA = """\
{%- for message in messages -%}
{{- message.role | upper + ': ' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- 'PICTURE\\n' -}}{%- endif -%}{%- endfor -%}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{%- endif -%}
{{- ' ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' -}}{%- endif -%}"""
"""As LLaVA's: all pictures of a turn come first."""

MISTRAL = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{- '[INST]' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- 'PICTURE' -}}{%- elif part.type == 'text' -%}{{- part.text -}}{%- endif -%}
{%- endfor -%}{%- endif -%}{{- '[/INST]' -}}
{%- elif message.content is string -%}{{- message.content + eos_token -}}
{%- else -%}{{- raise_exception('Only texts of the assistant are known') -}}{%- endif -%}
{%- endfor -%}"""
"""As Mistral's: lists are for the user alone."""

PREFIX = """\
{%- for part in messages[0].content -%}{%- if part.type == 'image' -%}{{- 'PICTURE' -}}{%- endif -%}{%- endfor -%}
{%- for part in messages[0].content -%}{%- if part.type == 'text' -%}{{- part.text -}}{%- endif -%}{%- endfor -%}
{{- '\n' -}}"""
"""As PaliGemma's prompts are: pictures, a question, a line's end."""

STRINGS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
"""Knows no lists."""


@dataclass(frozen=True, kw_only=True)
class PictureFamily:
    """What a folder of a family holds. tokens: special ones. named: by which attribute the tokenizer has them.
    config_token: that of the config's image_token_id. writes: what its template writes for a picture."""

    processor: str
    image: dict[str, Any]
    tokens: tuple[str, ...]
    config_token: str
    template: str
    writes: str
    named: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    config_field: str = "image_token_id"


def _qwen(processor: str, patch: int, **image: Any) -> PictureFamily:
    return PictureFamily(
        processor=processor,
        image={
            "image_processor_type": "Qwen2VLImageProcessorFast",
            "patch_size": patch,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 4 * (2 * patch) ** 2, "longest_edge": 64 * (2 * patch) ** 2},
            **_HALF,
            **image,
        },
        tokens=("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
        config_token="<|image_pad|>",
        template=CHATML,
        writes="<|vision_start|><|image_pad|><|vision_end|>",
    )


def _glm(processor: str, image: str) -> PictureFamily:
    return PictureFamily(
        processor=processor,
        image={
            "image_processor_type": image,
            "patch_size": 14,
            "merge_size": 2,
            "size": {"shortest_edge": 12544, "longest_edge": 100352},
            **_HALF,
        },
        tokens=(
            "<|im_start|>", "<|im_end|>", "<|begin_of_image|>", "<|end_of_image|>", "<|image|>",
            "<|begin_of_video|>", "<|end_of_video|>", "<|video|>",
        ),
        config_token="<|image|>",
        template=CHATML,
        writes="<|begin_of_image|><|image|><|end_of_image|>",
    )  # fmt: skip


_LLAVA_IMAGE = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, **_HALF}
_TILES = {"size": {"height": 56, "width": 56}, "max_patches": 6, "min_patches": 1, "crop_to_patches": True, **_HALF}

FAMILIES: dict[str, PictureFamily] = {
    "qwen2_vl": _qwen("Qwen2VLProcessor", 14),
    "qwen2_5_vl": _qwen("Qwen2_5_VLProcessor", 14),
    "qwen3_vl": _qwen("Qwen3VLProcessor", 16),
    "qwen3_5_moe": _qwen("Qwen3VLProcessor", 16),
    "glm4v": _glm("Glm4vProcessor", "Glm4vImageProcessor"),
    "glm46v": _glm("Glm46VProcessor", "Glm46VImageProcessor"),
    "gemma3": PictureFamily(
        processor="Gemma3Processor",
        image={
            "image_processor_type": "Gemma3ImageProcessor", "size": {"height": 56, "width": 56}, **_HALF,
            "pan_and_scan_min_crop_size": 16,
        },
        settings={"image_seq_length": 16},
        tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
                "<image_soft_token>"),
        named={"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        config_token="<image_soft_token>",
        config_field="image_token_index",
        template=GEMMA,
        writes="<start_of_image>",
    ),
    "gemma4": PictureFamily(
        processor="Gemma4Processor",
        image={"image_processor_type": "Gemma4ImageProcessor"},
        settings={"image_seq_length": 70,
                  "feature_extractor": {"feature_extractor_type": "Gemma4AudioFeatureExtractor"}},
        tokens=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|image>", "<image|>", "<|image|>", "<|audio>",
                "<audio|>", "<|audio|>", "<|video|>"),
        named={"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>", "boa_token": "<|audio>",
               "eoa_token": "<audio|>", "audio_token": "<|audio|>"},
        config_token="<|image|>",
        template=GEMMA,
        writes="\\n\\n<|image|>\\n\\n",
    ),
    "llava": PictureFamily(
        processor="LlavaProcessor",
        image={"image_processor_type": "CLIPImageProcessor", **_LLAVA_IMAGE},
        settings={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        tokens=("<s>", "</s>", "<image>"),
        config_token="<image>",
        config_field="image_token_index",
        template=LLAVA,
        writes="<image>",
    ),
    "llava_next": PictureFamily(
        processor="LlavaNextProcessor",
        image={
            "image_processor_type": "LlavaNextImageProcessor", **_LLAVA_IMAGE,
            "image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]],
        },
        settings={"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        tokens=("<s>", "</s>", "<image>"),
        config_token="<image>",
        config_field="image_token_index",
        template=LLAVA,
        writes="<image>",
    ),
    "granite4_vision": PictureFamily(
        processor="Granite4VisionProcessor",
        image={
            "image_processor_type": "LlavaNextImageProcessor", **_LLAVA_IMAGE,
            "image_grid_pinpoints": [[56, 56], [112, 168], [224, 112]],
        },
        settings={"patch_size": 14, "vision_feature_select_strategy": "full", "downsample_rate": "1/2"},
        tokens=("<|im_start|>", "<|im_end|>", "<image>"),
        config_token="<image>",
        config_field="image_token_index",
        template=CHATML,
        writes="<image>",
    ),
    "paligemma": PictureFamily(
        processor="PaliGemmaProcessor",
        image={"image_processor_type": "SiglipImageProcessor", "size": {"height": 28, "width": 28},
               "image_seq_length": 4, **_HALF},
        tokens=("<bos>", "<eos>", "<image>"),
        named={"image_token": "<image>"},
        config_token="<image>",
        config_field="image_token_index",
        template=PREFIX,
        writes="<image>",
    ),
    "ernie4_5_vl_moe": PictureFamily(
        processor="Ernie4_5_VLMoeProcessor",
        image={
            "image_processor_type": "Ernie4_5_VLMoeImageProcessor", "patch_size": 14, "merge_size": 2,
            "size": {"shortest_edge": 4 * 28 * 28, "longest_edge": 64 * 28 * 28}, **_HALF,
        },
        tokens=("<|im_start|>", "<|im_end|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<|IMAGE_PLACEHOLDER|>",
                "<|VIDEO_START|>", "<|VIDEO_END|>", "<|VIDEO_PLACEHOLDER|>"),
        named={"image_token": "<|IMAGE_PLACEHOLDER|>", "image_start_token": "<|IMAGE_START|>",
               "image_end_token": "<|IMAGE_END|>", "video_token": "<|VIDEO_PLACEHOLDER|>",
               "video_start_token": "<|VIDEO_START|>", "video_end_token": "<|VIDEO_END|>"},
        config_token="<|IMAGE_PLACEHOLDER|>",
        template=CHATML,
        writes="Picture 1:<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    ),
    "internvl": PictureFamily(
        processor="InternVLProcessor",
        image={"image_processor_type": "GotOcr2ImageProcessorFast", **_TILES},
        settings={"image_seq_length": 4},
        tokens=("<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named={"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
               "video_token": "<video>"},
        config_token="<IMG_CONTEXT>",
        template=CHATML,
        writes="<IMG_CONTEXT>\\n",
    ),
    "aya_vision": PictureFamily(
        processor="AyaVisionProcessor",
        image={"image_processor_type": "GotOcr2ImageProcessorFast", **_TILES},
        settings={"patch_size": 14, "img_size": 56, "downsample_factor": 2},
        tokens=("<|im_start|>", "<|im_end|>", "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>",
                "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
        config_token="<|IMG_PATCH|>",
        config_field="image_token_index",
        template=CHATML,
        writes="<image>",
    ),
    "idefics3": PictureFamily(
        processor="Idefics3Processor",
        image={
            "image_processor_type": "Idefics3ImageProcessor", **_HALF,
            "size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "do_image_splitting": True,
        },
        settings={"image_seq_len": 4},
        tokens=("<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>",
                "<end_of_utterance>", *(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))),
        config_token="<image>",
        template=CHATML,
        writes="<image>",
    ),
}  # fmt: skip
"""By model_type. Small pictures and few positions; the numbers are of nobody."""

TORCHVISION_FAMILIES: dict[str, PictureFamily] = {
    "mistral3": PictureFamily(
        processor="PixtralProcessor",
        image={"image_processor_type": "PixtralImageProcessor", "patch_size": 14, "size": {"longest_edge": 140},
               **_HALF},
        settings={"patch_size": 14, "spatial_merge_size": 2},
        tokens=("<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        config_token="[IMG]",
        config_field="image_token_index",
        template=MISTRAL,
        writes="[IMG]",
    ),
    "llama4": PictureFamily(
        processor="Llama4Processor",
        image={"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 56, "width": 56},
               "max_patches": 4, "resize_to_max_canvas": False, **_HALF},
        settings={"patch_size": 14},
        tokens=("<|im_start|>", "<|im_end|>", "<|image|>", "<|image_start|>", "<|image_end|>", "<|patch|>",
                "<|tile_x_separator|>", "<|tile_y_separator|>"),
        config_token="<|patch|>",
        config_field="image_token_index",
        template=CHATML,
        writes="<|image|>",
    ),
    "kimi_k25": PictureFamily(
        processor="Kimi_K25Processor",
        image={"image_processor_type": "Kimi_K25ImageProcessor", **_HALF},
        tokens=("<|im_start|>", "<|im_end|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
                "<|kimi_k25_video_placeholder|>"),
        config_token="<|media_pad|>",
        template=CHATML,
        writes="<|media_begin|>image<|media_content|><|media_pad|><|media_end|>",
    ),
}  # fmt: skip
"""Those whose processor needs torchvision."""


def tiny_tokenizer(family: PictureFamily) -> PreTrainedTokenizerFast:
    """Make a tokenizer of bytes and of the family's special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    ends = {"bos_token": family.tokens[0], "eos_token": family.tokens[1]}
    made.add_special_tokens(list(family.tokens))
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        additional_special_tokens=list(family.tokens),
        extra_special_tokens=family.named,
        chat_template=family.template.replace("PICTURE", family.writes),
        **ends,
    )


def write_folder(folder: Path, model_type: str, family: PictureFamily) -> Path:
    """Write the folder of a family. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(family)
    tokenizer.save_pretrained(folder)
    config = {"model_type": model_type, family.config_field: tokenizer.convert_tokens_to_ids(family.config_token)}
    processor = {"processor_class": family.processor, **family.settings}
    files = {
        "config.json": config,
        "preprocessor_config.json": {**family.image, "processor_class": family.processor},
        "processor_config.json": processor,
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values))
    return folder


class LocalReader:
    """A PictureReader in this process, without a store."""

    def __init__(self, folder: Path):
        self.processor = Processor(folder, lambda note: None)
        self.placeholder = self.processor.placeholder
        self.position_token_ids = self.processor.position_token_ids

    def read(self, data: bytes, detail: str | None = None) -> ReadPicture:
        """See PictureReader."""
        image = decode(data, lambda note: None)
        made = self.processor.process(image, detail or "auto")
        return ReadPicture(made.digest, made.text, made.num_positions, *image.size, closing=made.closing)
