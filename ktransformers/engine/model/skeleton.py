"""The Hugging Face module tree on `meta`: every module in place, not one weight byte."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ktransformers.engine.model.config_checks import check_config_values
from ktransformers.engine.model.file_layouts import arrange
from ktransformers.engine.model.text_models import causal_class
from ktransformers.errors import ConfigError, KTransformersError, UnsupportedError, reason_of
from ktransformers.models import deepseek_v41
from ktransformers.models.facts import LayerKind, ModelFacts
from ktransformers.models.families import NOT_IN_TRANSFORMERS
from ktransformers.models.fused_experts_adapter import adapt_fused_experts
from ktransformers.models.layers import number_mixers
from ktransformers.models.registry import OTHER_NAMES
from ktransformers.operators.attention.gqa import ATTENTION_NAME, register_attention
from ktransformers.system.file_kinds import why_not_json

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = [
    "build_causal",
    "build_skeleton",
    "check_kinds",
    "check_model_type",
    "load_hf_config",
    "restore_buffers",
]

logger = logging.getLogger(__name__)

_SUPPORTED_KINDS = frozenset(
    {LayerKind.FULL, LayerKind.SLIDING, LayerKind.CHUNKED, LayerKind.LATENT, LayerKind.COMPRESSED}
    | {LayerKind.RECURRENT, LayerKind.HYBRID, LayerKind.ROWWISE}
)
_OF_DECISIONS = "joint_head_config.json"
"""Beside the config of a model that decides the fields of a schema; its config.json is that of Qwen3.5."""


def load_hf_config(model_path: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of the model in folder `model_path`. Raises ConfigError when there is none or it is broken."""
    from transformers import AutoConfig

    path = model_path / "config.json"
    if not path.is_file():
        raise ConfigError(f"{model_path} holds no config.json; --model_path is the folder of the original model")
    values = _read_config_file(path, trust_remote_code)
    model_type = str(values.get("model_type"))
    known = OTHER_NAMES.get(model_type)
    try:
        if known is not None:
            logger.info("model type %s is run as %s", model_type, known)
            return _config_as(known, values)
        return AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever a config class does with values of the wrong type
        raise ConfigError(f"{path} cannot be used: {reason_of(error)}") from error


def _read_config_file(path: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The values of a config.json.

    Raises ConfigError for what would make transformers talk about its hub: no JSON, no known model_type.
    """
    from transformers import CONFIG_MAPPING, __version__

    data = path.read_bytes()
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} {why_not_json(data, error)}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object; it is not a model's config")
    check_config_values(values, f"{path}:")
    if path.with_name(_OF_DECISIONS).is_file():
        raise UnsupportedError(
            f"{path.with_name(_OF_DECISIONS)}: the model (Clef) chooses among the options of a schema by a head of its "
            "own, and writes no text"
        )
    model_type = values.get("model_type")
    if model_type == deepseek_v41.MODEL_TYPE:
        deepseek_v41.register()
    if isinstance(model_type, str) and (model_type in CONFIG_MAPPING or model_type in OTHER_NAMES):
        return values
    if "auto_map" in values and trust_remote_code:
        return values
    if (missing := NOT_IN_TRANSFORMERS.get(str(model_type))) is not None:
        raise UnsupportedError(
            f"{path}: model_type {model_type!r} is not supported: transformers {__version__} has no class for it "
            f"({missing})"
        )
    if "auto_map" in values:
        raise ConfigError(f"{path}: the model needs Python code that comes with it; --trust_remote_code runs it")
    if not isinstance(model_type, str):
        raise ConfigError(f"{path} names no model_type, so it is not a model's config")
    near = difflib.get_close_matches(model_type, CONFIG_MAPPING, n=1)
    hint = f"did you mean {near[0]}?" if near else "a newer version may know it: pip install -U transformers"
    raise UnsupportedError(f"{path}: transformers {__version__} does not know model_type {model_type!r:.60}; {hint}")


def _config_as(model_type: str, values: Mapping[str, Any]) -> PretrainedConfig:
    from transformers import CONFIG_MAPPING

    kept = {name: value for name, value in values.items() if name not in ("model_type", "auto_map")}
    return CONFIG_MAPPING[model_type].from_dict(kept)


def check_model_type(hf_config: PretrainedConfig, trust_remote_code: bool) -> None:
    """Raise UnsupportedError for what is no causal language model of transformers, unless it brings its own code."""
    if not _runs_own_code(hf_config, trust_remote_code):
        causal_class(hf_config)


def _runs_own_code(hf_config: PretrainedConfig, trust_remote_code: bool) -> bool:
    """Whether the model is built by a class that comes with it. An auto_map may name code of its tokenizer alone."""
    return trust_remote_code and "AutoModelForCausalLM" in (getattr(hf_config, "auto_map", None) or {})


def check_kinds(facts: ModelFacts) -> None:
    """Raise UnsupportedError for kinds of layers that have no cache here."""
    other = sorted({layer.word for layer in facts.layers if layer.kind not in _SUPPORTED_KINDS})
    if other:
        raise UnsupportedError(
            f"model type {facts.model_type} has layers of type {', '.join(other)}; "
            f"supported are {', '.join(sorted(_SUPPORTED_KINDS))}"
        )
    if facts.is_borrowing:
        raise UnsupportedError(
            f"the layers of model type {facts.model_type} have no keys and values of their own (num_kv_shared_layers "
            f"{facts.num_layers}): it drafts for another model, and does not run alone; load that model, with this one "
            "as --draft_model"
        )


def build_causal(hf_config: PretrainedConfig, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    """The causal LM of `hf_config` with options of `from_config`, by the model's own code where it brings some."""
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel
    if _runs_own_code(hf_config, trust_remote_code):
        model = AutoModelForCausalLM.from_config(hf_config, trust_remote_code=True, **options)
        number_mixers(model)
        # Neither `arrange` nor `adapt_fused_experts`: they put classes of transformers in the place of modules, and own
        # code may compute something else in modules of these names, or call them in another way. Without them a GGUF's
        # recurrent layers are taken apart while loading, and experts of another form keep their own forward.
        return model
    model = causal_class(hf_config)._from_config(hf_config, **options)
    number_mixers(model)
    arrange(model, hf_config)
    adapt_fused_experts(model)
    return model


def build_skeleton(hf_config: PretrainedConfig, trust_remote_code: bool = False) -> PreTrainedModel:
    """A causal LM of `transformers` on `meta`, in fp32, whose attention is ours. Raises UnsupportedError."""
    register_attention()
    try:
        with torch.device("meta"):
            model = build_causal(
                hf_config,
                trust_remote_code,
                attn_implementation=ATTENTION_NAME,
                dtype=torch.float32,
            )
    except KTransformersError:  # of a class of this package
        raise
    except Exception as error:  # whatever the modules of any family do with values that do not fit each other
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise UnsupportedError(
                f"model type {hf_config.model_type} attends by classes of its own, not through transformers' attention "
                "interface"
            ) from error
        raise UnsupportedError(
            f"transformers cannot build model type {hf_config.model_type} from its config: {reason_of(error)}"
        ) from error
    return model.eval()


def restore_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies and the like) and that are still on `meta`.

    `transformers` recomputes them in `_init_weights`; modules that also hold parameters have no such buffers in any
    family we know, and are refused rather than re-initialized.
    """
    for key, module in list(model.named_modules()):
        pending = [n for n in module._non_persistent_buffers_set if _is_meta(module._buffers.get(n))]
        if not pending:
            continue
        for name in pending:
            buffer = module._buffers[name]
            assert buffer is not None
            module._buffers[name] = torch.empty_like(buffer, device="cpu").fill_(_unset(buffer.dtype))
        try:
            _owner(model, key)._init_weights(module)
        except (AttributeError, RuntimeError, TypeError) as error:
            raise UnsupportedError(
                f"{key} ({type(module).__name__}): its buffers cannot be computed: {error}"
            ) from error
        if any(_is_unset(module._buffers[name]) for name in pending):
            owner = _owner(model, key)  # which may do so for all of its modules
            owner._init_weights(owner)
        for name in pending:
            if _is_unset(module._buffers[name]):
                raise UnsupportedError(f"{key}.{name} ({type(module).__name__}) is computed in a way we do not know")


def _unset(dtype: torch.dtype) -> float | int:
    """What no module computes for a buffer of that type."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype is torch.bool else int(torch.iinfo(dtype).max)


def _is_unset(buffer: torch.Tensor | None) -> bool:
    assert buffer is not None
    unset = buffer.isnan() if buffer.is_floating_point() or buffer.is_complex() else buffer == _unset(buffer.dtype)
    return buffer.dtype is not torch.bool and bool(unset.any())


def _owner(model: PreTrainedModel, key: str) -> Any:
    """The innermost model of transformers that holds a module: each initializes its own."""
    parts = key.split(".") if key else []
    inside = (model.get_submodule(".".join(parts[:count])) for count in range(len(parts), 0, -1))
    return next((module for module in inside if hasattr(module, "_init_weights")), model)


def _is_meta(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.is_meta
