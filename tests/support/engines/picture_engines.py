"""Engines of tiny composites that show pictures of random hidden states, and what transformers makes of the same."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Engine, Hardware, build_engine
from ktransformers.engine.media.family import PictureFamily, token_added_to
from ktransformers.engine.media.features import PictureFeatures
from ktransformers.engine.parallel.ranks.driver import Driver
from ktransformers.errors import EngineError
from ktransformers.media.records import MediaItem, Sight, is_media_id, media_ids
from tests.support.models.composites import tiny_composite
from tests.support.models.pooled_models import pooled_values

IMAGE_TOKEN = 3
AROUND = (4, 60)
"""Tokens around pictures that are routed as they are, where a family has experts for pictures."""


@dataclass
class Picture:
    """grid: patches of height and width, as processors with a grid have them."""

    grid: tuple[int, int, int]
    features: PictureFeatures
    digest: bytes


@dataclass
class Prompt:
    """ids: with pseudo-ids; plain_ids: with the family's image token in their place."""

    ids: list[int]
    media: list[MediaItem]

    @property
    def plain_ids(self) -> list[int]:
        return [IMAGE_TOKEN if is_media_id(one) else one for one in self.ids]


@dataclass
class ComposedPictures:
    """A PictureEncoder over a composite of transformers. layers: behind which features are added. broken: digests of
    pictures that cannot be had."""

    model: Any
    family: PictureFamily
    layers: tuple[int, ...] = ()
    pictures: dict[bytes, Picture] = field(default_factory=dict)
    broken: set[bytes] = field(default_factory=set)
    asked: list[bytes] = field(default_factory=list)

    @classmethod
    def of(cls, model: PreTrainedModel) -> ComposedPictures:
        layers: tuple[int, ...] = ()
        if (named := getattr(model.config, "deepstack_layer_map", None)) is not None:
            layers = tuple(layer - 1 for layer in (*(layer for _, layer in named), *model.config.spatial_target_layers))
        elif "deepstack" in inspect.getsource(type(model.model)):
            layers = (0, 1)
        family = replace(PictureFamily.of(model.config), added_to=token_added_to(model.model))
        return cls(model, family, layers)

    @property
    def adds_all(self) -> bool:
        """Whether nothing of a picture stands in the place of embeddings."""
        return hasattr(self.model.config, "deepstack_layer_map")

    @property
    def merge(self) -> int:
        return int(getattr(self.model.config.vision_config, "spatial_merge_size", 1))

    def picture(self, name: str, height: int = 2, width: int = 3) -> Picture:
        """A picture of height * width positions, with another content under each name."""
        hidden = self.model.config.get_text_config().hidden_size
        digest = blake2b(f"{name} {height} {width}".encode(), digest_size=32).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        made = [torch.randn(height * width, hidden, generator=generator) for _ in range(1 + len(self.layers))]
        grid = 1, height * self.merge, width * self.merge
        shown = torch.zeros_like(made[0]) if self.adds_all else made[0]
        found = Picture(grid, PictureFeatures(shown, dict(zip(self.layers, made[1:], strict=True))), digest)
        self.pictures[digest] = found
        return found

    def features(self, digest: bytes) -> PictureFeatures:
        self.asked.append(digest)
        if digest in self.broken:
            raise EngineError("the tower has fallen")
        return self.pictures[digest].features

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        if not hasattr(self.model.model, "get_rope_index"):
            return None
        types = torch.tensor([[int(is_media_id(one)) for one in token_ids]])
        grids = torch.tensor([self.pictures[item.digest].grid for item in media])
        ids = torch.tensor([[IMAGE_TOKEN if is_media_id(one) else one for one in token_ids]])
        found, _ = self.model.model.get_rope_index(ids, mm_token_type_ids=types, image_grid_thw=grids)
        positions: torch.Tensor = found[:, 0]
        return positions

    def prompt(self, *parts: Picture | Sequence[int]) -> Prompt:
        """Text and pictures one behind the other."""
        ids, media = list[int](), list[MediaItem]()
        for part in parts:
            if isinstance(part, Picture):
                count = len(part.features.hidden)
                media.append(MediaItem(part.digest, len(ids), count))
                ids += media_ids(part.digest, count)
            else:
                ids += part
        return Prompt(ids, media)

    def logits(self, prompt: Prompt, answer: Sequence[int] = ()) -> torch.Tensor:
        """What transformers' whole composite gives, [T, V]."""
        from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

        ids = [*prompt.plain_ids, *answer]
        shown = [self.pictures[item.digest] for item in prompt.media]
        types = torch.zeros(1, len(ids), dtype=torch.int64)
        for item in prompt.media:
            types[0, item.start : item.end] = 1
        hidden: Any = tuple(one.features.hidden for one in shown)
        if self.wants_one and shown:
            hidden = torch.cat(hidden)[None]
        by_layer: list[Any] = [tuple(one.features.by_layer[layer] for one in shown) for layer in self.layers]
        if self.adds_all:
            by_layer = [(layer + 1, parts) for layer, parts in zip(self.layers, by_layer, strict=True)]
        output = BaseModelOutputWithDeepstackFeatures(pooler_output=hidden, deepstack_features=by_layer)
        output.router_logits = None  # of Granite Docling
        known = inspect.signature(self.model.forward).parameters
        inner = inspect.signature(self.model.model.forward).parameters
        given: dict[str, Any] = {"mm_token_type_ids": types, "token_type_ids": types}
        if self.family.sight is Sight.PROMPT:  # where 1 is what follows it
            given["token_type_ids"] = torch.tensor([[0 if shown else 1] * len(prompt.ids) + [1] * len(answer)])
        around = [one in AROUND for one in prompt.ids] + [False] * len(answer)
        given["moe_mm_token_type_ids"] = types | torch.tensor([around])
        given["image_grid_thw"] = torch.tensor([one.grid for one in shown])
        given = {name: value for name, value in given.items() if name in known or name in inner}
        with torch.no_grad():
            made: torch.Tensor = self.model(
                input_ids=torch.tensor([ids]), mm_encoder_outputs={"image": output} if shown else None, **given
            ).logits[0]
        return made

    @property
    def wants_one(self) -> bool:
        """Whether the family's tower gives one tensor, and not one for each picture."""
        source = inspect.getsource(type(self.model.model).forward)
        return "torch.cat(" not in source


def picture_composite(name: str, seed: int = 1, **text_values: object) -> PreTrainedModel:
    """A tiny composite whose image token is in its vocabulary, and whose layers all can run."""
    if name == "qwen4_exp":
        text_values = {**pooled_values("qwen4_exp_text"), **text_values}
    model = tiny_composite(name, seed=seed, **text_values)
    model.config.image_token_id = IMAGE_TOKEN
    if name == "ernie4_5_vl_moe":
        model.config.image_start_token_id, model.config.image_end_token_id = AROUND
    return model


def picture_engine(
    model: PreTrainedModel,
    folder: Path,
    hardware: Hardware | None = None,
    worker_hardware: str | None = None,
    **settings: object,
) -> tuple[Engine, ComposedPictures]:
    """An engine of the composite's text model, which shows pictures. worker_hardware: where other processes run."""
    model.save_pretrained(folder)
    values = {"cache_lens": 256, "cpu_infer": 1, "picture_folder": folder, "tower_device": "none", **settings}
    config = EngineConfig(model_path=folder, **values)  # type: ignore[arg-type]
    ranks = None if worker_hardware is None else Driver(config, None, worker_hardware)
    engine = build_engine(config, hardware=hardware, page_size=8, max_batch_size=4, ranks=ranks)
    pictures = ComposedPictures.of(model)
    engine.executor.pictures = pictures
    return engine, pictures
