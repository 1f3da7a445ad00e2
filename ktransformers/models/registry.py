"""Registry of what is particular to families: rule files, other names, and which stored tensors a model may leave
unread.

Knows facts and modules, not files of weights. Families that need nothing special are not listed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ktransformers.models.facts import ModelFacts
from ktransformers.models.families import TESTED_TYPES
from ktransformers.system.shipped_rules import shipped_path

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

__all__ = [
    "OTHER_NAMES",
    "TESTED_TYPES",
    "Family",
    "UpstreamNames",
    "custom_models",
    "default_optimize_rules",
    "family_of",
    "ignorable_tensors",
    "is_tested",
    "routed_experts",
]


@dataclass(frozen=True, slots=True)
class UpstreamNames:
    """Names that upstream has for a family. module: in modeling_MODULE; prefixes: of class names, upstream's
    and ours.
    """

    module: str
    prefixes: tuple[str, str] = ("", "")


@dataclass(frozen=True, slots=True)
class Family:
    """Particulars of one model_type.

    rules: the name of a shipped file, None for a default one; rules_without_q_lora: the one for a full-rank query.
    gguf_arch: whose tensor names safetensors have that upstream's scripts merged. expert_type: of published experts.
    old_segments: of modules' names, that of transformers 5 and the older one in checkpoints and rule files.
    """

    rules: str | None = None
    rules_without_q_lora: str | None = None
    gguf_arch: str | None = None
    expert_type: str | None = None
    old_segments: tuple[str, str] | None = None
    upstream: UpstreamNames | None = None


_SPARSE_BLOCK = ("mlp", "block_sparse_moe")

custom_models: Mapping[str, Family] = {
    "axk2": Family("AXK2.yaml"),
    "bailing_hybrid": Family("BailingHybrid.yaml"),
    "deepseek_v2": Family(
        "DeepSeek-V2-Chat.yaml", "DeepSeek-V2-Lite-Chat.yaml", "deepseek2", upstream=UpstreamNames("deepseek")
    ),
    "deepseek_v3": Family("DeepSeek-V3-Chat.yaml", gguf_arch="deepseek2", upstream=UpstreamNames("deepseekv3")),
    "deepseek_v32": Family("DeepSeek-V32.yaml"),
    "deepseek_v4": Family("DeepSeek-V4.yaml", expert_type="MXFP4"),
    "deepseek_v41": Family("DeepSeek-V41.yaml", expert_type="MXFP4"),
    "dots1": Family("Dots1.yaml"),
    "dots3_note_text": Family("Dots3Note.yaml"),
    "ernie4_5_moe": Family("Ernie4_5_Moe.yaml"),
    "glm4_moe": Family("Glm4Moe.yaml", gguf_arch="glm4moe"),
    "glm4_moe_lite": Family("Glm4MoeLite.yaml"),
    "glm_moe_dsa": Family("GlmMoeDsa.yaml"),
    "glm5_next_text": Family("Glm5Next.yaml"),
    "gpt_oss": Family(expert_type="MXFP4"),
    "hunyuan_v1_moe": Family(
        "Hunyuan-A13B.yaml", upstream=UpstreamNames("hunyuan", prefixes=("HunYuan", "HunYuanMoEV1"))
    ),
    "hy_v4": Family("HYV4.yaml"),
    "hy_v4_vl_text": Family("HYV4.yaml"),
    "jetmoe": Family("JetMoe.yaml"),
    "kimi_linear": Family("KimiLinear.yaml"),
    "llama4_text": Family("Llama4.yaml"),
    "longcat_flash": Family("LongcatFlash.yaml"),
    "minimax_m2": Family(old_segments=_SPARSE_BLOCK),
    "minimax_m3_vl_text": Family("MiniMaxM3.yaml"),
    "mistral4": Family("Mistral4.yaml"),
    "mixtral": Family("Mixtral.yaml", old_segments=_SPARSE_BLOCK),
    "phimoe": Family(old_segments=_SPARSE_BLOCK),
    "qwen2_moe": Family("Qwen2-57B-A14B-Instruct.yaml", gguf_arch="qwen2moe"),
    "qwen3_moe": Family("Qwen3Moe-ktransformers.yaml", gguf_arch="qwen3moe"),
    "qwen4_exp_text": Family("Qwen4Exp.yaml"),
}
"""By model_type: families that need something particular. The classes of all models are those of transformers.

Which families run at all is said by models/families.py.
"""

OTHER_NAMES: Mapping[str, str] = {"kimi_k2": "deepseek_v3"}
"""model_type of published configs -> the class of transformers that computes the same.

Such configs name Python files of the model's own, which are not needed then."""


def family_of(model_type: str) -> Family:
    """Return what is particular to `model_type`; nothing for most."""
    return custom_models.get(model_type, Family())


def is_tested(facts: ModelFacts) -> bool:
    """Whether tests cover the family: one of transformers' own configs, in the list."""
    return facts.is_of_transformers and facts.model_type in TESTED_TYPES


def default_optimize_rules(facts: ModelFacts, model: nn.Module | None = None) -> Path:
    """Return the path of the rule file for a model that comes without --optimize_config_path.

    model, when it is at hand (on meta), tells whether there are experts; otherwise the config's words count.
    """
    family = family_of(facts.model_type)
    if family.rules is None:
        has_experts = facts.experts is not None if model is None else bool(routed_experts(model))
        return shipped_path("default-moe.yaml" if has_experts else "default-dense.yaml")
    is_full_rank = facts.latent is not None and facts.latent.q_rank is None
    return shipped_path(family.rules_without_q_lora if is_full_rank and family.rules_without_q_lora else family.rules)


def routed_experts(model: nn.Module) -> dict[str, int]:
    """Return {experts module: number of experts}, by the fused 3-D parameters that transformers >= 5 keeps them in."""
    found = {}
    for key, module in model.named_modules():
        down = module._parameters.get("down_proj")
        if down is not None and down.dim() == 3:
            found[key] = int(down.shape[0])
    return found


def ignorable_tensors(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return a predicate: which stored tensors `model` (a causal LM of transformers) does without, by their names in
    the files.

    These are what its class declares (`_keys_to_ignore_on_load_unexpected`), and experts without weights. Sources know
    what files may hold besides whatever the class (`WeightSource.ignorable`).
    """
    declared: Iterable[str] = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    patterns = [re.compile(pattern) for pattern in declared]
    # Experts that return what they are given have numbers behind the others', and need no weights.
    weighted = {key: len(module.down_proj) for key, module in model.named_modules() if _has_identities(module)}
    expert = re.compile(r"(.+)\.(\d+)\.[^.]+\.weight$")

    def is_ignorable(name: str) -> bool:
        one = expert.match(name) if weighted else None
        if one is not None and int(one.group(2)) >= weighted.get(one.group(1), 1 << 30):
            return True
        return any(pattern.search(name) for pattern in patterns)

    return is_ignorable


def _has_identities(module: nn.Module) -> bool:
    return bool(getattr(module, "zero_expert_num", None)) and "down_proj" in module._parameters
