"""The keywords of LLM and AsyncLLM: our own, and those of vLLM's LLM that mean something here.

Does not open the model's files.
"""

from __future__ import annotations

import difflib
import os
import types
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Union, get_args, get_origin, get_type_hints

from ktransformers.config import EngineConfig, bundled_files, precision_fields
from ktransformers.engine.sequence.prompts import shown
from ktransformers.errors import ConfigError, UnsupportedError
from ktransformers.hub.locate import LocatedModel, locate_model, locate_path
from ktransformers.profiling.capture import MAX_BYTES, ProfileLimits, ProfileTarget

__all__ = ["EngineKeywords", "LLMOptions", "llm_options"]

PathLike = str | os.PathLike[str]


class EngineKeywords(TypedDict, total=False):
    """The fields of EngineConfig besides the two paths to the model, then those of vLLM's LLM.

    precision: exact, fast or close, for the fields of precision that are not given (docs/bench.md).
    cache_lens: tokens of keys and values, of all prompts together. max_batch_size: prompts answered at once.
    page_size: tokens of a page of the cache; prompts share whole pages. seed: makes all that is drawn repeatable.
    profile: a folder to be made, in which the time of every step and token is recorded (docs/profiling.md), in files of
    at most profile_max_bytes together.
    max_model_len is cache_lens, max_num_seqs max_batch_size, max_num_batched_tokens chunk_size, block_size page_size,
    enable_prefix_caching prefix_cache, kv_cache_dtype kv_type, tensor_parallel_size tensor_parallel,
    pipeline_parallel_size pipeline, enforce_eager the opposite of use_cuda_graph. Of dtype only "auto" is taken,
    gpu_memory_utilization and quantization not at all: the error names what does it here.
    """

    optimize_config_path: PathLike | None
    cache_lens: int
    chunk_size: int
    max_new_tokens: int
    cpu_infer: int
    cpu_quant: str | None
    precision: str
    cpu_prefill: str
    cpu_activations: str
    cpu_bf16: str
    gpu_memory: float
    hot_experts: str
    lend_slots: bool | None
    experts_from: str
    experts_ram: float
    use_cuda: bool | None
    use_cuda_graph: bool | None
    attention_backend: str
    tower_device: str
    mmproj: PathLike | None
    sparse_attention: str
    kv_type: str
    attention_products: str
    prefix_cache: bool
    cpu_memory_size_GB: float
    kv_disk_path: PathLike | None
    kv_disk_size_GB: float
    self_check: bool
    speculative: str
    speculative_tokens: int
    draft_model: PathLike | None
    tensor_parallel: int
    pipeline: int
    strict: bool
    trust_remote_code: bool
    trust_rules: bool
    chat_template: str | None
    tool_format: str
    reasoning_format: str
    max_batch_size: int
    page_size: int
    seed: int | None
    profile: PathLike | None
    profile_max_bytes: int
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int
    enable_prefix_caching: bool | None
    kv_cache_dtype: str
    enforce_eager: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    dtype: str
    gpu_memory_utilization: float
    quantization: str | None


@dataclass(frozen=True, slots=True)
class LLMOptions:
    """The values that LLM's keywords stand for. config is not resolved yet. seed None: every request without one draws
    its own."""

    config: EngineConfig
    max_batch_size: int = 16
    page_size: int = 64
    seed: int | None = None
    profile: ProfileTarget | None = None

    def __post_init__(self) -> None:
        for name, most in (("max_batch_size", 1 << 16), ("page_size", 1 << 16)):
            value = getattr(self, name)
            if not isinstance(value, int) or not 1 <= value <= most:
                raise ConfigError(f"{name} must be a number from 1 to {most}, got {value!r}")


_RENAMED = {
    "max_model_len": "cache_lens",
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "chunk_size",
    "block_size": "page_size",
    "enable_prefix_caching": "prefix_cache",
    "kv_cache_dtype": "kv_type",
    "tensor_parallel_size": "tensor_parallel",
    "pipeline_parallel_size": "pipeline",
}
"""vLLM's keywords with a counterpart of another name. None means the default there, and here."""

_FIXED: dict[str, tuple[object, str]] = {
    "dtype": ("auto", "weights keep the numbers of their file; cpu_quant quantizes experts while loading"),
    "gpu_memory_utilization": (None, "it is given in GiB here, as gpu_memory=20 (0, the default: all that is free)"),
    "quantization": (None, "weights keep the numbers of their file; cpu_quant='q4_k' quantizes experts while loading"),
}
"""vLLM's keywords of which one value, if any, is what we do anyway: (that value, what to use for the others)."""


def llm_options(
    model: PathLike | None, gguf_path: PathLike | None, model_path: PathLike | None, options: Mapping[str, Any]
) -> LLMOptions:
    """Check the keywords of LLM and return them as LLMOptions. Raises ConfigError, for an unknown one with the nearest
    that exists."""
    known = EngineKeywords.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, (*known, "model", "gguf_path", "model_path", "progress"), n=1)
            raise ConfigError(f"LLM has no keyword {name}" + (f"; did you mean {near[0]}?" if near else ""))
    _check_types(options, get_type_hints(EngineKeywords))
    own = _translated(options)
    if (precision := own.pop("precision", None)) is not None:
        own |= precision_fields(precision, own)
    kept = {name: own.pop(name) for name in ("max_batch_size", "page_size", "seed") if name in own}
    target = _profile_target(own.pop("profile", None), own.pop("profile_max_bytes", MAX_BYTES))
    for name in ("optimize_config_path", "kv_disk_path", "mmproj"):
        if own.get(name) is not None:
            own[name] = Path(own[name])
    if own.get("draft_model") is not None:
        own["draft_model"] = locate_path(own["draft_model"], "draft_model")
    files = _files(model, gguf_path, model_path)
    config = EngineConfig(model_path=files.model_path, gguf_path=files.gguf_path, **own)
    return LLMOptions(config, profile=target, **kept)


def _profile_target(folder: PathLike | None, max_bytes: int) -> ProfileTarget | None:
    return None if folder is None else ProfileTarget(Path(folder), ProfileLimits(max_bytes))


def _translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same in our own keywords."""
    own: dict[str, Any] = {}
    for name, value in options.items():
        if name in _FIXED:
            only, instead = _FIXED[name]
            if value is not None and value != only:
                raise UnsupportedError(f"{name}={value!r} is not supported: {instead}")
            continue
        if name == "enforce_eager":
            target, value = "use_cuda_graph", False if value else None
        else:
            target = _RENAMED.get(name, name)
        if name != target and value is None:
            continue
        if target in options and name != target:
            raise ConfigError(f"{name} and {target} are the same: give one of them")
        own[target] = value
    return own


def _files(model: PathLike | None, gguf_path: PathLike | None, model_path: PathLike | None) -> LocatedModel:
    for name, value in (("model", model), ("gguf_path", gguf_path), ("model_path", model_path)):
        if value is not None and not isinstance(value, str | os.PathLike):
            raise ConfigError(f"{name} must be a path or a name, got {value!r}")
    if model is not None and model_path is not None:
        raise ConfigError("model and model_path both name a model: give one of them (and gguf_path, for its weights)")
    if model is not None and gguf_path is None:
        return locate_model(model)
    folder = model if model_path is None else model_path  # LLM("folder", "weights.gguf")
    if folder is None and gguf_path is None:
        gguf, eyes = bundled_files('name one, as in LLM("model.gguf")')
        return LocatedModel(model_path=eyes, gguf_path=gguf)
    return LocatedModel(
        model_path=None if folder is None else Path(folder), gguf_path=None if gguf_path is None else Path(gguf_path)
    )


_WANTED: Mapping[object, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    os.PathLike: "a path",
}


def _check_types(options: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Raise ConfigError for the first value that is not of the type its annotation in `hints` names."""
    for name, value in options.items():
        kinds = _kinds(hints[name])
        if not any(_is_a(value, kind) for kind in kinds):
            wanted = [_WANTED[kind] for kind in kinds if kind in _WANTED and not (kind is str and os.PathLike in kinds)]
            unset = " or None" if type(None) in kinds else ""
            raise ConfigError(f"{name} must be {' or '.join(wanted)}{unset}, got {shown(value)}")


def _kinds(hint: Any) -> list[object]:
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in _kinds(each)]
    return [get_origin(hint) or hint]


def _is_a(value: object, kind: Any) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))
