"""From paths to a loaded engine: config, skeleton, plan, operators, weights, cache, tokenizer.

The order matters: everything that can be refused is refused before the first weight byte is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.cache.static import LayerShape, StaticCache
from ktransformers.config import EngineConfig
from ktransformers.engine.runner import StaticRunner
from ktransformers.engine.skeleton import build_skeleton, cache_shapes, load_hf_config, restore_buffers
from ktransformers.kernels.native import WorkerPool
from ktransformers.kernels.quant import QuantType
from ktransformers.models.gguf_config import config_of_model
from ktransformers.models.registry import default_rules, ignorable_tensors
from ktransformers.operators.base import OperatorConfig
from ktransformers.optimize.apply import apply_plan, load_plan
from ktransformers.optimize.machine import detect_machine
from ktransformers.optimize.plan import Plan, make_plan
from ktransformers.optimize.rules import load_rules
from ktransformers.tokenizer import Tokenizer, load_tokenizer
from ktransformers.weights.gguf import GGUFModel, open_gguf
from ktransformers.weights.gguf_source import GGUFSource
from ktransformers.weights.loader import WeightFormat, weight_format
from ktransformers.weights.safetensors import open_safetensors
from ktransformers.weights.safetensors_source import SafetensorsSource
from ktransformers.weights.source import WeightSource

__all__ = [
    "DEFAULT_CACHE_LEN",
    "Engine",
    "OpenedModel",
    "Progress",
    "build_engine",
    "cache_len_of",
    "eos_token_ids_of",
    "generation_defaults_of",
    "load_model_tokenizer",
    "open_model",
    "plan_model",
]

logger = logging.getLogger(__name__)

DEFAULT_CACHE_LEN = 8192
"""Tokens of the static cache when --cache_lens is not given, if the model's context is that long."""

Progress = Callable[[int, int, str], None]
"""Called while loading with (bytes loaded, bytes in all, dotted name of the module)."""


@dataclass(slots=True)
class Engine:
    """A loaded model with what is needed to feed it. tokenizer has no vocabulary when the model's files carry none."""

    config: EngineConfig
    hf_config: Any
    plan: Plan
    runner: StaticRunner
    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    generation_defaults: Mapping[str, Any]
    description: str

    def close(self) -> None:
        """Stop the worker threads. The engine cannot be used afterwards."""
        self.runner.pool.close()


@dataclass(slots=True)
class OpenedModel:
    """The model's files, opened, and the skeleton that they will fill."""

    config: EngineConfig
    hf_config: Any
    gguf: GGUFModel | None
    model: Any
    source: WeightSource


def open_model(config: EngineConfig) -> OpenedModel:
    """Open a model's files and build its skeleton. Reads headers only. Raises ConfigError or WeightError."""
    config = config.resolved()
    path = config.gguf_path or config.model_path
    assert path is not None
    # A model's own folder may hold a GGUF beside its safetensors; a path given as weights must be unambiguous.
    prefer: WeightFormat | None = None if config.gguf_path is not None else "safetensors"
    gguf = open_gguf(path) if weight_format(path, prefer) == "gguf" else None
    hf_config = _hf_config(config, gguf, path)
    model = build_skeleton(hf_config, config.trust_remote_code)
    source: WeightSource
    if gguf is not None:
        source = GGUFSource(gguf, model.config)
    else:
        source = SafetensorsSource(open_safetensors(path), model.config)
    return OpenedModel(config, model.config, gguf, model, source)


def _hf_config(config: EngineConfig, gguf: GGUFModel | None, path: Path) -> Any:
    """--model_path's config.json, else what the GGUF's metadata say, else the config.json beside the weights."""
    folder = config.model_path
    if gguf is not None and (folder is None or (folder == path and not (folder / "config.json").is_file())):
        return config_of_model(gguf)
    folder = folder or (path if path.is_dir() else path.parent)
    return load_hf_config(folder, config.trust_remote_code).get_text_config(decoder=True)


def cache_len_of(config: EngineConfig, hf_config: Any) -> int:
    """Tokens of a static cache: what the user says, else the model's context up to DEFAULT_CACHE_LEN."""
    context = int(getattr(hf_config, "max_position_embeddings", 0) or DEFAULT_CACHE_LEN)
    if config.cache_lens > context:
        logger.warning("--cache_lens %d is beyond the model's context of %d tokens", config.cache_lens, context)
    return config.cache_lens or min(context, DEFAULT_CACHE_LEN)


def _make_plan(opened: OpenedModel, pool: WorkerPool | None) -> tuple[Plan, list[LayerShape], int]:
    """The plan with the cache's bytes in it, the shape of each layer's cache, and the cache's length."""
    config, model = opened.config, opened.model
    rules = load_rules(config.optimize_config_path or default_rules(opened.hf_config, model))
    is_unused = ignorable_tensors(model)
    quant = None if config.cpu_quant is None else QuantType[config.cpu_quant.upper()]
    plan = make_plan(
        model,
        rules,
        operator_config=OperatorConfig(opened.hf_config, pool, quant),
        source=opened.source,
        machine=detect_machine(),
        strict=config.strict,
        ignorable=lambda name: opened.source.ignorable(name) or is_unused(name),
    )
    shapes, max_len = cache_shapes(model, plan.operators), cache_len_of(config, opened.hf_config)
    plan = replace(plan, extra_bytes={"kv cache": {"cpu": StaticCache.size(shapes, max_len)}})
    return plan, shapes, max_len


def plan_model(config: EngineConfig) -> Plan:
    """What `build_engine` would do with `config`. Reads headers only. Raises the same errors, except for the fit."""
    return _make_plan(open_model(config), pool=None)[0]


def build_engine(config: EngineConfig, progress: Progress | None = None) -> Engine:
    """Load a model. Raises ConfigError, RuleError, WeightError or CapacityError, each before it is too late."""
    opened = open_model(config)
    pool = WorkerPool(opened.config.cpu_infer)
    try:
        plan, shapes, max_len = _make_plan(opened, pool)
        plan.check_fits()
        tokenizer = load_model_tokenizer(opened)
        _load(opened, plan, progress)
    except BaseException:
        pool.close()
        raise
    runner = StaticRunner(opened.model, StaticCache(shapes, max_len), pool, opened.hf_config.vocab_size)
    defaults = generation_defaults_of(opened)
    return Engine(
        config=replace(opened.config, cache_lens=max_len),
        hf_config=opened.hf_config,
        plan=plan,
        runner=runner,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids_of(opened, defaults, tokenizer),
        generation_defaults=defaults,
        description=f"{opened.hf_config.model_type}, {opened.source.describe()}",
    )


def _load(opened: OpenedModel, plan: Plan, progress: Progress | None) -> None:
    total = sum(plan.weight_bytes.values())
    apply_plan(opened.model, plan)
    restore_buffers(opened.model)
    if progress is None:
        load_plan(opened.model, plan, opened.source)
    else:
        load_plan(opened.model, plan, opened.source, lambda done, key: progress(done, total, key))


def load_model_tokenizer(opened: OpenedModel) -> Tokenizer:
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


def generation_defaults_of(opened: OpenedModel) -> dict[str, Any]:
    """Sampling settings that the model's authors recommend (generation_config.json), as far as we know them."""
    from transformers import GenerationConfig

    folder = _tokenizer_path(opened)
    if folder is None or not (folder / "generation_config.json").is_file():
        return {}
    values = GenerationConfig.from_pretrained(folder, local_files_only=True).to_diff_dict()
    known = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id", "do_sample")
    return {name: values[name] for name in known if values.get(name) is not None}


def eos_token_ids_of(opened: OpenedModel, defaults: Mapping[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids that end an answer, by the generation config, the model's config and the tokenizer together."""
    ids: set[int] = set()
    for value in (defaults.get("eos_token_id"), getattr(opened.hf_config, "eos_token_id", None)):
        ids.update(value if isinstance(value, list) else [] if value is None else [value])
    ids.update(tokenizer.eos_token_ids)
    return tuple(sorted(ids))
