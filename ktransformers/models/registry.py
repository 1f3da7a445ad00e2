"""Which rule file a model gets when none is given, and which stored tensors it may leave unread.

Knows configs, not files of weights. Families that need nothing special are not listed: they get the default files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from ktransformers.errors import ConfigError
from ktransformers.shipped_rules import RULES_DIR

__all__ = [
    "FAMILIES",
    "OTHER_NAMES",
    "RULES_DIR",
    "TESTED_TYPES",
    "Family",
    "default_rules",
    "has_experts",
    "ignorable_tensors",
    "is_tested",
]


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one model_type. rules: the file in RULES_DIR; rules_without_q_lora: the one for a full-rank query."""

    rules: str
    rules_without_q_lora: str | None = None


FAMILIES: Mapping[str, Family] = {
    "deepseek_v2": Family("DeepSeek-V2-Chat.yaml", rules_without_q_lora="DeepSeek-V2-Lite-Chat.yaml"),
    "deepseek_v3": Family("DeepSeek-V3-Chat.yaml"),
    "dots1": Family("Dots1.yaml"),
    "ernie4_5_moe": Family("Ernie4_5_Moe.yaml"),
    "glm4_moe": Family("Glm4Moe.yaml"),
    "hunyuan_v1_moe": Family("Hunyuan-A13B.yaml"),
    "mixtral": Family("Mixtral.yaml"),
    "qwen2_moe": Family("Qwen2-57B-A14B-Instruct.yaml"),
    "qwen3_moe": Family("Qwen3Moe-ktransformers.yaml"),
}

OTHER_NAMES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""model_type of published configs -> the class of transformers that computes the same.

Such configs name Python files of the model's own, which are not needed then."""

TESTED_TYPES = frozenset(
    {"afmoe", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "exaone_moe", "gemma2", "gemma3_text", "glm4_moe"}
    | {"gpt_oss", "granitemoe", "hunyuan_v1_moe", "llama", "mellum", "minimax_m2", "ministral3", "mistral", "mixtral"}
    | {"olmo3", "olmoe", "phi3", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "smollm3"}
)
"""Model types whose logits tests/models compares with transformers'; others are compared while loading."""


def is_tested(hf_config: Any) -> bool:
    """Whether tests cover the family: one of transformers' own configs, in the list."""
    return hf_config.model_type in TESTED_TYPES and type(hf_config).__module__.startswith("transformers.")


# The names under which configs of transformers say how many routed experts a layer has.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def default_rules(hf_config: Any, model: nn.Module | None = None) -> Path:
    """The rule file for a model without one of its own.

    model, when it is at hand (on meta), tells whether there are experts; otherwise the config's words count.
    """
    family = FAMILIES.get(hf_config.model_type)
    if family is None:
        return RULES_DIR / ("default-moe.yaml" if has_experts(hf_config, model) else "default-dense.yaml")
    is_full_rank = getattr(hf_config, "q_lora_rank", None) is None
    return RULES_DIR / (family.rules_without_q_lora if is_full_rank and family.rules_without_q_lora else family.rules)


def has_experts(hf_config: Any, model: nn.Module | None = None) -> bool:
    """Whether some layer routes tokens to experts: a module with 3-D down_proj, or a config that counts experts."""
    if model is not None:
        return any(_holds_experts(module) for module in model.modules())
    counts = (getattr(hf_config, name, None) for name in _NUM_EXPERTS)
    return any(isinstance(count, int) and count > 1 for count in counts)


def _holds_experts(module: nn.Module) -> bool:
    down = module._parameters.get("down_proj")
    return down is not None and down.dim() == 3


def ignorable_tensors(model: Any) -> Callable[[str], bool]:
    """Tells which stored tensors `model` (a causal LM of transformers) does without, by their names in the files.

    These are what its class declares (`_keys_to_ignore_on_load_unexpected`), layers for multi-token prediction after
    the last one, and rotary frequencies, which old checkpoints carry and which follow from the config.
    """
    declared: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in declared]
    patterns.append(re.compile(r"rotary_emb\.inv_freq$"))
    layer = re.compile(r"(?:^|\.)(?:layers|blk)\.(\d+)\.")
    first = int(model.config.num_hidden_layers)
    following = getattr(model.config, "num_nextn_predict_layers", None) or 0
    if not isinstance(following, int):
        raise ConfigError(f"the model's config says num_nextn_predict_layers {following!r:.60}; a number is needed")
    extra = range(first, first + following)

    def is_ignorable(name: str) -> bool:
        found = layer.search(name)
        is_prediction_layer = found is not None and int(found.group(1)) in extra
        return is_prediction_layer or any(pattern.search(name) for pattern in patterns)

    return is_ignorable
