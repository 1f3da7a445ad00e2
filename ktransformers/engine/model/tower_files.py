"""The tower that goes with a model's files: of its projector, of its own GGUF, or of safetensors.

Says in the log what is left unread, and why no pictures come.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.config import EngineConfig
from ktransformers.engine.model.tower import OpenedTower, composite_of, open_mmproj, open_tower, projector_path
from ktransformers.errors import ConfigError, FormatError, TensorMismatchError, UnsupportedError
from ktransformers.models.composite import text_config_of
from ktransformers.models.facts import ModelFacts
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.mmproj import mmproj_inside
from ktransformers.weights.safetensors.file import SafetensorsModel
from ktransformers.weights.safetensors.source import SafetensorsSource

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["open_projector", "open_tower_of", "tower_folder", "with_projector"]

logger = logging.getLogger(__name__)


def with_projector(
    config: EngineConfig, whole: PretrainedConfig, gguf: GGUFModel
) -> tuple[PretrainedConfig, GGUFModel | None]:
    """The config of a GGUF's composite, and its projector file, opened; the language model's own, and None, where there
    is none, or with a line of the log, where nobody named the file, and it is not read. Raises UnsupportedError or
    FormatError for one that was."""
    if config.mmproj is not None and config.tower_device == "none":
        logger.warning("--mmproj %s is left unread: --tower_device none leaves the tower out", config.mmproj)
    if not config.wants_tower:
        return whole, None
    path = projector_path(config, gguf.files[0].path)
    try:
        projector = mmproj_inside(gguf) if path is None else open_gguf(path)
        if projector is not None:
            return composite_of(whole, gguf, projector), projector
    except (UnsupportedError, FormatError) as error:
        where = path or gguf.files[0].path
        message = str(error) if str(where) in str(error) else f"{where}: {error}"
        if config.mmproj is not None:
            raise type(error)(message) from error
        logger.warning("no pictures: %s", message)
        return whole, None
    if tower_folder(config, whole) is None:
        logger.warning("no pictures: no projector file (mmproj-*.gguf) is beside %s", gguf.files[0].path)
    return whole, None


def open_projector(config: EngineConfig, whole: PretrainedConfig, projector: GGUFModel) -> OpenedTower | None:
    """The tower of a projector file; None, with a line of the log, where it is a part of the model's own file and makes
    no tower. Raises TensorMismatchError for a part of a tower in a file of its own."""
    try:
        return open_mmproj(whole, projector)
    except TensorMismatchError as error:
        if projector.metadata.get("general.architecture") == "clip":
            raise
        logger.warning("no pictures: %s", error)
        return None


def tower_folder(config: EngineConfig, whole: PretrainedConfig) -> Path | None:
    """The composite's folder that was given beside a GGUF, where pictures come, and the tower may be in its
    safetensors. None: there is none."""
    folder = config.model_path
    if not config.wants_tower or folder is None or text_config_of(whole) is whole or not folder.is_dir():
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def open_tower_of(
    config: EngineConfig, whole: PretrainedConfig, stored: SafetensorsModel, text: SafetensorsSource, facts: ModelFacts
) -> OpenedTower | None:
    """The tower of safetensors where pictures come; None, with a line of the log, where the model has none. Says what
    is left unread. Raises TensorMismatchError for a part of a tower."""
    if config.mmproj is not None:
        raise ConfigError(f"--mmproj {config.mmproj} goes with a GGUF; the tower of safetensors is among them")
    tower = None
    if config.wants_tower:
        try:
            tower = open_tower(whole, stored, text, facts)
        except UnsupportedError as error:
            logger.info("no pictures: %s", error)
    left = text.others - (frozenset() if tower is None else tower.stored_names())
    if left:
        logger.info("%d tensors for %s are left unread", len(left), "images and sound" if tower is None else "sound")
    return tower
