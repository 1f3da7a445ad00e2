"""A composite's tower on `meta`: everything but its language model that makes pictures into hidden states.

    Qwen3VLForConditionalGeneration        OpenedTower.model
      model.visual            ...          model.visual
      model.language_model    ...          (left out)
      lm_head                 ...          (left out)

What that is, is found by the config: the class that transformers has for it, the part of it that has
`get_image_features`, and in that what is neither its decoder nor made for sound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import nn

from ktransformers.config import EngineConfig
from ktransformers.engine.model.mtp_names import with_names
from ktransformers.errors import TensorMismatchError, UnsupportedError, reason_of
from ktransformers.kernels.types import QuantType
from ktransformers.models.composite import num_heads_of, text_config_of
from ktransformers.models.facts import ModelFacts
from ktransformers.models.gguf.mmproj import composite_from_mmproj, projector_of
from ktransformers.weights.conversion.checkpoint_names import CheckpointNames
from ktransformers.weights.gguf.file import GGUFModel
from ktransformers.weights.gguf.mmproj import MmprojSource, mmproj_beside
from ktransformers.weights.safetensors.file import SafetensorsModel
from ktransformers.weights.safetensors.source import SafetensorsSource
from ktransformers.weights.source import TensorInfo

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "FEATURES",
    "OpenedTower",
    "TowerSource",
    "build_tower",
    "composite_of",
    "open_mmproj",
    "open_tower",
    "picture_host",
    "projector_path",
]

_SHOWN_NAMES = 3
_NATURAL = {QuantType.BF16: torch.bfloat16, QuantType.F16: torch.float16}
FEATURES = "get_image_features"
"""The method of composites that runs their tower."""


class TowerSource(Protocol):
    """Where the tensors of a tower are: what a WeightSource has for tensors that are read dense."""

    def find(self, name: str) -> TensorInfo | None:
        """Return facts about the tensor that transformers calls `name`, or None when the files do not hold it."""
        ...

    def dense(self, name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor as a new one of its logical shape. Raises TensorMismatchError when it is missing."""
        ...


@dataclass(frozen=True, slots=True)
class OpenedTower:
    """A tower whose files are open. model: the composite on `meta`, without its language model. source: its tensors."""

    model: PreTrainedModel
    source: TowerSource

    def stored_names(self) -> frozenset[str]:
        """Return the tensors of the files that it reads."""
        return frozenset(stored for info in self._infos() for stored in info.stored_names)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the type that a tensor is kept in on the CPU: the files' own, fp32 for what has none of torch's."""
        info = self.source.find(name)
        assert info is not None
        return _NATURAL.get(info.resident_type, torch.float32)

    def nbytes(self, dtype: torch.dtype | None = None) -> int:
        """Return the bytes of all tensors in `dtype`; None: each in its `dtype_of`."""
        return sum(math.prod(info.shape) * (dtype or self.dtype_of(info.name)).itemsize for info in self._infos())

    def check(self) -> None:
        """Raise TensorMismatchError for tensors that are missing or of another shape, which it names."""
        problems = []
        for name, tensor in self.model.state_dict().items():
            info = self.source.find(name)
            if info is None:
                problems.append(f"{name} is missing")
            elif tuple(info.shape) != tuple(tensor.shape):
                problems.append(f"{name} has shape {tuple(info.shape)}, its config needs {tuple(tensor.shape)}")
        if problems:
            more = f" and {len(problems) - _SHOWN_NAMES} more" if len(problems) > _SHOWN_NAMES else ""
            raise TensorMismatchError(
                f"the files hold only a part of the model's tower for pictures: {', '.join(problems[:_SHOWN_NAMES])}"
                f"{more}; a file is missing or damaged, or belongs to another model"
            )

    def _infos(self) -> Iterator[TensorInfo]:
        found = (self.source.find(name) for name in self.model.state_dict())
        return (info for info in found if info is not None)


def open_tower(
    whole: PretrainedConfig, stored: SafetensorsModel, text: SafetensorsSource, facts: ModelFacts
) -> OpenedTower:
    """Open the tower of a composite's safetensors. text: where its language model is read from.

    Raises UnsupportedError, with the reason, for a model that has none, and TensorMismatchError for a part of one.
    """
    model = build_tower(whole)
    files = with_names(stored, {name: name for name in text.others})
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    names = CheckpointNames.of_model(model, files.tensors)
    tower = OpenedTower(model, SafetensorsSource(files, replace(facts, composite_type=None), shapes, names))
    if not tower.stored_names():
        raise UnsupportedError("the files hold no tensors of the model's tower")
    tower.check()
    return tower


def projector_path(config: EngineConfig, path: Path) -> Path | None:
    """Return the projector file of the GGUF at `path`: the one that is named, or beside it; None: there is none."""
    return config.mmproj or mmproj_beside(path)


def composite_of(whole: PretrainedConfig, gguf: GGUFModel, projector: GGUFModel) -> PretrainedConfig:
    """Return the config of the composite that a GGUF and its projector file make. whole: of the GGUF, or of the folder
    with the original one, which is a composite's already.

    Raises UnsupportedError or FormatError.
    """
    projector_of(projector.metadata)
    if text_config_of(whole) is not whole:
        return whole
    shapes = {name: tuple(tensor.shape) for name, tensor in projector.tensors.items()}
    sections = np.asarray(gguf.metadata.get(f"{gguf.architecture}.rope.dimension_sections", ()))
    return composite_from_mmproj(projector.metadata, shapes, whole, sections.ravel().tolist())


def open_mmproj(whole: PretrainedConfig, file: GGUFModel) -> OpenedTower:
    """Open the tower of a projector file, or of one inside the model's own. whole: the composite's config.

    Raises UnsupportedError for a projector that is not read here, and TensorMismatchError for a part of a tower.
    """
    projector, model = projector_of(file.metadata), build_tower(whole)
    vision = model.config.vision_config
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    deepstack = getattr(vision, "deepstack_visual_indexes", None) or ()
    tower = OpenedTower(model, MmprojSource(file, projector, shapes, num_heads_of(vision), deepstack))
    tower.check()
    return tower


def build_tower(whole: PretrainedConfig) -> PreTrainedModel:
    """Build the composite of a config on `meta`, in fp32, and take its language model out of it.

    Raises UnsupportedError, with the reason, for a model that has no tower.
    """
    from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    config = copy.deepcopy(whole)
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or text_config_of(config) is config:
        raise UnsupportedError(f"model type {config.model_type} has no tower for pictures")
    text_config_of(config)._attn_implementation = "eager"  # of what is left out
    try:
        with torch.device("meta"):
            model: PreTrainedModel = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]._from_config(
                config, dtype=torch.float32
            )
    except Exception as error:  # whatever the modules of any family do with values that do not fit each other
        raise UnsupportedError(
            f"transformers cannot build the tower of model type {config.model_type}: {reason_of(error)}"
        ) from error
    _leave_the_rest_out(model)
    return model.eval()


def picture_host(model: PreTrainedModel) -> nn.Module:
    """Return the part of a composite that has `get_image_features` and the modules that it runs."""
    base: nn.Module = model.base_model
    return base if hasattr(type(base), FEATURES) else model


def _leave_the_rest_out(model: PreTrainedModel) -> None:
    """Take from a composite what no picture reaches."""
    host, decoder = picture_host(model), model.get_decoder()
    if not hasattr(type(host), FEATURES) or decoder is host:
        raise UnsupportedError(f"model type {model.config.model_type} has no tower apart from its language model")

    def is_of_pictures(name: str, module: nn.Module) -> bool:
        return "audio" not in name and not any(inner is decoder for inner in module.modules())

    _keep(host, is_of_pictures)
    if host is not model:
        _keep(model, lambda name, module: module is host)
    if not any(True for _ in model.parameters()):
        raise UnsupportedError(f"the config of this model ({model.config.model_type}) has no tower for pictures")


def _keep(parent: nn.Module, is_kept: Callable[[str, nn.Module], bool]) -> None:
    for name, module in list(parent.named_children()):
        if not is_kept(name, module):
            setattr(parent, name, None)
