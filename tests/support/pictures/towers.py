"""Tiny random models for images and text with towers worth comparing, and pictures as their processors make them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, PreTrainedModel

from ktransformers.engine.media.encoder import FEATURE_BYTES, TowerEncoder
from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.towers import TowerPlace, load_tower
from ktransformers.engine.model.tower import OpenedTower
from ktransformers.kernels.cpu import WorkerPool
from tests.support.models.composites import COMPOSITES, WHOLE
from tests.support.models.tiny_models import fill_randomly, tiny_config

IMAGE_TOKEN = 150
VIDEO_TOKEN = 151

_TEXTS: Mapping[str, str] = {"internvl": "qwen2", "llava": "llama", "cohere2_vision": "cohere2", "lfm2_vl": "lfm2"}
"""Families that are no composite of COMPOSITES, and the types of their text configs."""

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "depth": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_heads": 2,
    "head_dim": 16,
    "out_hidden_size": 64,
    "projection_dim": 32,
    "vision_output_dim": 64,
    "projector_input_dim": 64,
    "projector_output_dim": 64,
    "projection_hidden_size": 32,
    "alignment_intermediate_size": 48,
    "projector_hidden_size": 48,
    "merged_hidden_size": 256,
    "projection_intermediate_size": 48,
    "deepstack_visual_indexes": [0, 1],
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 64,
    "num_patches": 64,
    "pos_emb_height": 8,
    "pos_emb_width": 8,
    "mm_tokens_per_image": 4,
    "position_embedding_size": 64,
}
"""Under all names that configs have for sizes; each takes those that it knows."""

_OWN: Mapping[str, dict[str, Any]] = {
    "qwen2_vl": {"hidden_size": 64},  # of the language model there
    "gemma3": {"image_size": 56, "patch_size": 14, "vision_use_head": False},
    "cohere2_vision": {"image_size": 56, "patch_size": 14, "vision_use_head": False},
    "llava": {"image_size": 56, "patch_size": 14},
    "internvl": {"image_size": [56, 56], "patch_size": [14, 14]},
    "llama4": {"image_size": 56, "patch_size": 14, "intermediate_size": 128},
    "mistral3": {"image_size": 112, "patch_size": 14},
    "minimax_m3_vl": {"head_dim": 16, "image_size": 112},
    "lfm2_vl": {"vision_use_head": False},
}

_GRIDS = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v"),
    *("exaone4_5", "kimi_k25", "minimax_m3_vl", "glm5_next", "ernie4_5_vl_moe"),
)
TOWERS = (
    *(*_GRIDS, "gemma3", "gemma4", "mistral3", "llama4", "internvl", "llava", "cohere2_vision", "lfm2_vl"),
    *WHOLE,
)
"""Families whose towers are compared."""


def tiny_with_tower(
    name: str,
    seed: int = 0,
    image_token: int = IMAGE_TOKEN,
    vocab_size: int | None = None,
    text_values: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A composite with two layers of text and three of its tower, in fp32. vocab_size: None: the usual one.
    text_values: of its text config, beside the usual ones."""
    text_type, values = COMPOSITES.get(name, (_TEXTS.get(name, f"{name}_text"), {}))
    if name in ("qwen2_vl", "qwen2_5_vl"):
        values = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}}
    text = tiny_config(text_type, **{**values, **(text_values or {})}).to_dict()
    text["vocab_size"] = vocab_size or text["vocab_size"]
    whole = {"vision_config": {"model_type": "gemma4_vision"}} if name == "gemma4" else WHOLE.get(name, {})
    config = CONFIG_MAPPING[name](text_config=text, **whole)
    for part, own in () if name in WHOLE else ((config.vision_config, _OWN.get(name, {})), (config, {})):
        for key, value in {**_SIZES, **own}.items():
            if key in part.__dict__ and part is not config.text_config:
                setattr(part, key, value)
    for key in ("image_token_id", "image_token_index", "image_patch_id"):
        if key in config.__dict__:
            setattr(config, key, image_token)
    for key in ("video_token_id", "video_token_index"):
        if key in config.__dict__:
            setattr(config, key, VIDEO_TOKEN)
    config.tie_word_embeddings = False
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    fill_randomly(model, seed)
    return model.eval()


def picture(name: str, model: PreTrainedModel, height: int, width: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """The tensors of a picture of height x width units: pairs of patches, or for families of fixed sizes tiles."""
    generator = torch.Generator().manual_seed(100 * seed + 10 * height + width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    vision = model.config.vision_config
    rows, cols, patch = 2 * height, 2 * width, vision.patch_size
    grid = {"image_grid_thw": torch.tensor([[1, rows, cols]])}
    if name == "kimi_k25":
        return {"pixel_values": random(rows * cols, 3, patch, patch), **grid}
    if name in _GRIDS:
        return {"pixel_values": random(rows * cols, 3 * getattr(vision, "temporal_patch_size", 1) * patch**2), **grid}
    if name == "mistral3":
        size = (rows * patch, cols * patch)
        return {"pixel_values": random(1, 3, *size), "image_sizes": torch.tensor([size])}
    if name == "lfm2_vl":
        mask = torch.zeros(1, 64, dtype=torch.int64)
        mask[:, : rows * cols] = 1
        pixels = random(1, 64, 3 * patch**2) * mask[..., None]
        return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": torch.tensor([[rows, cols]])}
    if name == "gemma4":
        side = vision.pooling_kernel_size
        where = torch.cartesian_prod(torch.arange(side * height), torch.arange(side * width)).flip(-1)
        return {"pixel_values": random(1, len(where), 3 * patch**2).sigmoid(), "image_position_ids": where[None]}
    if name == "molmo2":  # of 2 x 2 patches for a position, of one crop of 4 x 4
        where = (
            torch.arange(16).view(2, 2, 2, 2).transpose(1, 2).reshape(4, 4).repeat(height * width, 1)[: height * width]
        )
        pixels = random(1, 16, 3 * patch**2)
        return {
            "pixel_values": pixels,
            "image_token_pooling": where,
            "image_grids": torch.tensor([[height, width, 0, 0]]),
        }
    if name == "idefics3":
        pixels = random(1, height * width, 3, vision.image_size, vision.image_size)
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(pixels[:, :, 0].shape, dtype=torch.bool)}
    if name == "granite_docling":
        pixels = random(1, height * width, 3, vision.image_size, vision.image_size)
        return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, height * width, dtype=torch.bool)}
    if name == "granite4_vision":
        size = (height * vision.image_size, width * vision.image_size)
        tiles = 1 + height * width
        return {
            "pixel_values": random(1, tiles, 3, vision.image_size, vision.image_size),
            "image_sizes": torch.tensor([size]),
        }
    tiles = height * width if name in ("llama4", "internvl", "cohere2_vision") else 1
    size = vision.image_size if isinstance(vision.image_size, int) else vision.image_size[0]
    return {"pixel_values": random(tiles, 3, size, size)}


def encoder_over(
    tower: OpenedTower, folder: Path, pool: WorkerPool, place: TowerPlace | None = None, max_bytes: int = FEATURE_BYTES
) -> TowerEncoder:
    """Load a tower, for the pictures in `folder`."""
    family = PictureFamily.of(tower.model.config)
    return TowerEncoder(load_tower(tower, place or TowerPlace()), family, folder, pool, max_bytes)


def save_picture(folder: Path, digest: bytes, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put a picture into a store."""
    safetensors.torch.save_file(dict(tensors), folder / f"{digest.hex()}.safetensors", metadata={"kind": "image"})


class _HeardError(Exception):
    """Ends a forward once its language model has been called."""


def heard(model: PreTrainedModel, ids: Sequence[int], **tensors: torch.Tensor) -> dict[str, Any]:
    """What transformers' composite hands to its language model: `inputs_embeds`, `position_ids` and the like."""
    kept: dict[str, Any] = {}

    def take(module: object, args: object, kwargs: dict[str, Any]) -> None:
        kept.update(kwargs)
        raise _HeardError

    hook = model.get_decoder().register_forward_pre_hook(take, with_kwargs=True)
    tokens = torch.tensor([list(ids)])
    types = (tokens == IMAGE_TOKEN).int()
    try:
        with torch.no_grad():
            model(input_ids=tokens, mm_token_type_ids=types, token_type_ids=types, use_cache=False, **tensors)
    except _HeardError:
        return kept
    finally:
        hook.remove()
    raise AssertionError("the language model was not called")
