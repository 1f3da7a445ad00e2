"""The pictures of a GGUF with llama.cpp's projector file: the folder of transformers' processor, made of that file.

mmproj-F16.gguf ──> preprocessor_config.json, processor_config.json    sizes, means, classes
the tokenizer   ──> tokenizer.json, config.json                        the token of a picture's positions
"""

from __future__ import annotations

import json
from pathlib import Path

from ktransformers.config import EngineConfig
from ktransformers.engine.model.tower import projector_path
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from ktransformers.models.gguf.mmproj_processor import MmprojProcessor, mmproj_processor
from ktransformers.tokenizer.tokenizer import Tokenizer
from ktransformers.weights.gguf.file import GGUFModel, gguf_files, open_gguf
from ktransformers.weights.gguf.mmproj import mmproj_inside
from ktransformers.weights.loader import weight_format

__all__ = ["gguf_of", "projector_processor", "write_processor"]

_POSITION_FIELD = "image_token_id"


def projector_processor(config: EngineConfig) -> MmprojProcessor | None:
    """Return the processor that the projector file of a model is for, or the tower in its own file; None: the model is
    no GGUF, or has neither.

    Reads headers only. Raises FormatError, or UnsupportedError for projectors that are not read here;
    both name the file.
    """
    path = gguf_of(config)
    if path is None:
        return None
    beside = projector_path(config, path)
    try:
        projector = _inside(path) if beside is None else open_gguf(beside)
        return None if projector is None else mmproj_processor(projector.metadata)
    except (FormatError, UnsupportedError) as error:
        where = beside or path
        raise type(error)(str(error) if str(where) in str(error) else f"{where}: {error}") from error


def _inside(path: Path) -> GGUFModel | None:
    try:
        model = open_gguf(path)
    except FormatError:
        return None  # who loads the model says what is wrong with it
    return mmproj_inside(model)


def gguf_of(config: EngineConfig) -> Path | None:
    """The first GGUF file of a model; None for one of safetensors, or that is not there."""
    given = config.gguf_path or config.model_path
    if given is None:
        return None
    path = Path(given)
    try:
        kind = weight_format(path, None if config.gguf_path is not None else "safetensors")
    except (ConfigError, FormatError):
        return None  # as above
    if kind != "gguf":
        return None
    return next(iter(gguf_files(path)), None) if path.is_dir() else path


def write_processor(folder: Path, processor: MmprojProcessor, tokenizer: Tokenizer) -> None:
    """Write the files of a processor into a folder, over those that are there. tokenizer: of the model.

    Raises ConfigError where it has no vocabulary, or lacks a token that the processor writes for a picture.
    """
    position = _position_of(processor, tokenizer)
    lacking = [token for token in (position, *processor.tokens) if _id_of(token, tokenizer) is None]
    if lacking:
        raise ConfigError(f"its tokenizer has no {', '.join(lacking)}, which stand in a prompt for a picture")
    tokenizer.backend.save_pretrained(folder)
    kept = folder / "tokenizer_config.json"
    named = {name: position if token == processor.position else token for name, token in processor.named.items()}
    files = {
        "config.json": {"model_type": processor.model_type, _POSITION_FIELD: _id_of(position, tokenizer)},
        "preprocessor_config.json": {**processor.image, "processor_class": processor.text["processor_class"]},
        "processor_config.json": processor.text,
        kept.name: {**json.loads(kept.read_bytes()), **named},
    }
    for name, values in files.items():
        (folder / name).write_text(json.dumps(values), encoding="utf-8")


def _position_of(processor: MmprojProcessor, tokenizer: Tokenizer) -> str:
    """The token of a picture's positions, as far as this vocabulary has one."""
    stand_in = processor.stand_in
    if stand_in is None or _id_of(processor.position, tokenizer) is not None or _id_of(stand_in, tokenizer) is None:
        return processor.position
    return stand_in


def _id_of(token: str, tokenizer: Tokenizer) -> int | None:
    """The id of a token that texts are cut at; None: there is none."""
    ids = tokenizer.encode(token, add_special_tokens=False)
    return ids[0] if len(ids) == 1 else None
