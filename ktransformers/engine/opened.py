"""A model's files, opened: config, skeleton, weights' headers, tokenizer. Reads no weights and decides no placement.

A synthetic model has no files: its config is made in code, its weights are random, and it has no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ktransformers.config import EngineConfig
from ktransformers.engine.bounds import check_experts, check_layers, check_parameters
from ktransformers.engine.skeleton import build_skeleton, load_hf_config
from ktransformers.errors import ConfigError, FormatError, UnsupportedError, reason_of
from ktransformers.file_kinds import wrong_start
from ktransformers.models.gguf_config import config_of_model
from ktransformers.tokenizer import Tokenizer, has_tokenizer_files, load_tokenizer
from ktransformers.weights.gguf import GGUFModel, open_gguf
from ktransformers.weights.gguf_source import GGUFSource
from ktransformers.weights.loader import WeightFormat, weight_format
from ktransformers.weights.safetensors import open_safetensors
from ktransformers.weights.safetensors_source import SafetensorsSource
from ktransformers.weights.source import WeightSource
from ktransformers.weights.synthetic import SyntheticSource

__all__ = [
    "ModelDescription",
    "OpenedModel",
    "context_len_of",
    "describe_model",
    "folder_without_tokenizer",
    "longest_sequence",
    "open_model",
    "open_synthetic",
]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What can be known of a model without its weights, for those who speak to an engine in another process.

    context_len: most tokens of one sequence that the model was made for; None: it does not say.
    architecture: the class name in its config.json. generation_defaults: see generation_config.json.
    """

    tokenizer: Tokenizer
    vocab_size: int
    context_len: int | None
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]
    architecture: str | None
    description: str


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """The model's files, opened, and the skeleton that they will fill. files: those with weights, which get mapped."""

    config: EngineConfig
    hf_config: Any
    gguf: GGUFModel | None
    model: Any
    source: WeightSource
    files: tuple[Path, ...] = ()


def open_model(config: EngineConfig) -> OpenedModel:
    """Open a model's files and build its skeleton. Reads headers only. Raises ConfigError or WeightError."""
    config = config.resolved()
    path, kind = _weights_of(config)
    gguf = open_gguf(path) if kind == "gguf" else None
    hf_config = _hf_config(config, gguf, path)
    stored = None if gguf is not None else open_safetensors(path)
    shapes = [tensor.shape for tensor in (gguf or stored).tensors.values()]  # type: ignore[union-attr]
    check_layers(hf_config, shapes)
    check_experts(hf_config)
    model = build_skeleton(hf_config, config.trust_remote_code)
    source: WeightSource
    if gguf is not None:
        source, files = GGUFSource(gguf, model.config), [file.path for file in gguf.files]
    else:
        assert stored is not None
        source, files = SafetensorsSource(stored, model.config), [file.path for file in stored.files]
    check_parameters(model, source, shapes)
    return OpenedModel(config, model.config, gguf, model, source, tuple(files))


def _weights_of(config: EngineConfig) -> tuple[Path, WeightFormat]:
    path = config.gguf_path or config.model_path
    assert path is not None
    # A model's own folder may hold a GGUF beside its safetensors; a path given as weights must be unambiguous.
    return path, weight_format(path, None if config.gguf_path is not None else "safetensors")


def folder_without_tokenizer(config: EngineConfig) -> Path | None:
    """The folder that should hold the model's tokenizer and does not; None when it does, or when a GGUF may have it.

    Raises ConfigError or WeightError for paths that hold no model.
    """
    config = config.resolved()
    path, kind = _weights_of(config)
    if kind == "gguf":
        return None
    folder = config.model_path or (path if path.is_dir() else path.parent)
    return None if has_tokenizer_files(folder) else folder


def open_synthetic(config: EngineConfig, hf_config: Any) -> OpenedModel:
    """A model of `hf_config` with random weights, which are made when operators load them. config names no files.

    Raises ConfigError or UnsupportedError.
    """
    if config.model_path is not None or config.gguf_path is not None:
        raise ConfigError("random weights come from no files: leave the model's path out")
    config = config.resolved(needs_model=False)
    model = build_skeleton(hf_config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return OpenedModel(config, model.config, None, model, SyntheticSource(shapes, model.config))


def _hf_config(config: EngineConfig, gguf: GGUFModel | None, path: Path) -> Any:
    """--model_path's config.json, else what the GGUF's metadata say, else the config.json beside the weights."""
    folder = config.model_path
    if gguf is not None and (folder is None or (folder == path and not (folder / "config.json").is_file())):
        try:
            return config_of_model(gguf)
        except (FormatError, UnsupportedError) as error:
            raise type(error)(f"{gguf.files[0].path}: {error}") from error
    folder = folder or (path if path.is_dir() else path.parent)
    return load_hf_config(folder, config.trust_remote_code).get_text_config(decoder=True)


MAX_POSITIONS = 1 << 40
_EXTENDED_BY_FACTOR = frozenset({"linear", "dynamic"})


def context_len_of(hf_config: Any) -> int | None:
    """Most tokens of one sequence that a model was made for; None when its config does not say.

    max_position_embeddings, or more where RoPE is scaled: some configs count the scaling in it, others do not.
    """
    positions = getattr(hf_config, "max_position_embeddings", 0) or 0
    if not isinstance(positions, int | float) or not 0 <= positions <= MAX_POSITIONS:
        raise ConfigError(f"the model's config says max_position_embeddings {positions!r:.60}, which no model has")
    positions = int(positions)
    rope = getattr(hf_config, "rope_parameters", None)
    rope = rope if isinstance(rope, dict) else {}
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if positions and isinstance(factor, (int, float)):
        largest = max(positions, original if isinstance(original, int | float) else 0)
        if not 0 < factor * largest <= MAX_POSITIONS:
            raise ConfigError(f"the model's config scales RoPE by {factor!r:.60}, which no model does")
        if rope.get("rope_type") == "yarn" and original:
            positions = max(positions, int(original * factor))
        elif rope.get("rope_type") in _EXTENDED_BY_FACTOR and not original:
            positions = int(positions * factor)
    return positions or None


def longest_sequence(hf_config: Any, num_slots: int) -> int:
    """Most positions of one sequence: all slots of the cache, or what the model was made for."""
    return min(context_len_of(hf_config) or num_slots, num_slots)


def describe_model(opened: OpenedModel) -> ModelDescription:
    """The facts of an opened model, its tokenizer loaded. Raises ConfigError."""
    tokenizer, defaults = _load_tokenizer(opened), _generation_defaults(opened)
    architectures = getattr(opened.hf_config, "architectures", None)
    return ModelDescription(
        tokenizer=tokenizer,
        vocab_size=int(opened.hf_config.vocab_size),
        context_len=context_len_of(opened.hf_config),
        eos_token_ids=_eos_token_ids(opened, defaults, tokenizer),
        generation_defaults=defaults,
        architecture=str(architectures[0]) if isinstance(architectures, list) and architectures else None,
        description=f"{opened.hf_config.model_type}, {opened.source.describe()}",
    )


def _load_tokenizer(opened: OpenedModel) -> Tokenizer:
    """The tokenizer in the model's folder, else the one in its GGUF file. Raises ConfigError."""
    return load_tokenizer(
        _tokenizer_path(opened),
        None if opened.gguf is None else opened.gguf.metadata,
        trust_remote_code=opened.config.trust_remote_code,
    )


def _tokenizer_path(opened: OpenedModel) -> Path | None:
    """The folder with the tokenizer's files: --model_path, or the safetensors folder itself."""
    if opened.config.model_path is not None:
        return opened.config.model_path
    path = opened.config.gguf_path
    if path is None or opened.gguf is not None:
        return None
    return path if path.is_dir() else path.parent


def _generation_defaults(opened: OpenedModel) -> dict[str, Any]:
    """Sampling settings that the model's authors recommend (generation_config.json), as far as we know them."""
    from transformers import GenerationConfig

    folder = _tokenizer_path(opened)
    if folder is None or not (folder / "generation_config.json").is_file():
        return {}
    try:
        values = GenerationConfig.from_pretrained(folder, local_files_only=True).to_diff_dict()
    except Exception as error:  # whatever transformers does with values of the wrong type
        path = folder / "generation_config.json"
        why = wrong_start(path.read_bytes()) or f"cannot be used: {reason_of(error)}; mend it, or move it away"
        raise ConfigError(f"{path} {why}") from error
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "do_sample")
    return {name: values[name] for name in known if values.get(name) is not None}


def _eos_token_ids(opened: OpenedModel, defaults: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer, by the generation config, the model's config and the tokenizer together."""
    ids: set[int] = set()
    for value in (defaults.get("eos_token_id"), getattr(opened.hf_config, "eos_token_id", None)):
        several = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in several):
            raise ConfigError(
                f"the model's config says eos_token_id {value!r:.60}; a token's number is needed, or a list"
            )
        ids.update(several)
    ids.update(tokenizer.eos_token_ids)
    return tuple(sorted(ids))
