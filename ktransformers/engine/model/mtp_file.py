"""Layers for multi-token prediction in a GGUF of their own, as llama.cpp's converter writes them with --mtp.

    mtp-Model-Q8_0.gguf    the model's metadata, block_count and nextn_predict_layers as if it held all;
                           blk.N... behind the model's own; token_embd, output_norm and output as the model has them;
                           output_hc_...: DeepSeek-V4's, of the layer alone

It is read as if the model's own file held its blocks. A file of that name may be an assistant of Gemma 4, too, which
then is the model that drafts.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from functools import partial

from ktransformers.config import EngineConfig
from ktransformers.engine.model.mtp_names import with_names
from ktransformers.errors import ConfigError
from ktransformers.models.assistant_config import GGUF_ARCH
from ktransformers.models.facts import ModelFacts
from ktransformers.system.file_kinds import MTP_PREFIX, drafter_rank
from ktransformers.weights.gguf.file import GGUFModel, beside, open_gguf

__all__ = ["joined_with_layers", "resolve_drafter"]

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"blk\.(\d{1,9})\.")
_MIXER = "output_hc_"


def resolve_drafter(config: EngineConfig, model: GGUFModel) -> tuple[EngineConfig, GGUFModel | None]:
    """Return the file with a model's layers for multi-token prediction, where they are asked for and are in a file of
    their own, and the configuration that takes them: the file that --draft_model names, or, where the model's holds
    none, the one beside it whose name says so. None: there is none, or what drafts is an assistant, which the
    configuration names then. Raises FormatError."""
    named = config.draft_model
    if named is not None:
        found = open_gguf(named) if named.suffix == ".gguf" else None
        if found is None or min(_blocks(found), default=0) == 0:
            return config, None
        return replace(config, draft_model=None, speculative="mtp"), found
    path = beside(model.files[0].path, lambda name: name.startswith(MTP_PREFIX), partial(_rank, model))
    if config.drafter != "mtp" or path is None or any(".nextn." in name for name in model.tensors):
        return config, None
    found = open_gguf(path)
    if found.architecture == GGUF_ARCH:
        return replace(config, draft_model=path), None
    return config, found


def _rank(model: GGUFModel, name: str) -> tuple[int, str]:
    return drafter_rank(name, model.files[0].path.name)


def _blocks(model: GGUFModel) -> set[int]:
    return {int(match[1]) for name in model.tensors if (match := _BLOCK.match(name)) is not None}


def joined_with_layers(model: GGUFModel, layers: GGUFModel, facts: ModelFacts) -> GGUFModel:
    """Return a model's GGUF with the layers for multi-token prediction of another one, as a file that holds both.

    facts: of the model. Raises ConfigError for layers of another model.
    """
    path, first = layers.files[0].path, min(_blocks(layers), default=0)
    width = layers.metadata.get(f"{layers.architecture}.embedding_length")
    if (layers.architecture, first, width) != (model.architecture, facts.num_layers, facts.hidden_size):
        raise ConfigError(
            f"{path}: layers for multi-token prediction behind {first} layers {width} wide of {layers.architecture}, "
            f"and the model has {facts.num_layers} layers {facts.hidden_size} wide of {model.architecture}: they are "
            "of another model"
        )
    logger.info("layers for multi-token prediction are read from %s", path)
    names = {name: ours for name in layers.tensors if (ours := _name_in_block(name, first)) is not None}
    return GGUFModel([*with_names(layers, names).files, *model.files])


def _name_in_block(name: str, first: int) -> str | None:
    """The name of a tensor in the file that holds all; None for one that the model itself has."""
    if _BLOCK.match(name):
        return name
    return f"blk.{first}.nextn.hc_head_{name.removeprefix(_MIXER)}" if name.startswith(_MIXER) else None
