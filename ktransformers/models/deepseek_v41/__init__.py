"""DeepSeek-V4.1 (`deepseek_v41`), of which transformers has no class: config, modules on `meta`, hashes of n-grams.

`register` makes transformers' Auto classes know it, so that it is opened, planned and loaded like any other family.
"""

from __future__ import annotations

from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers.models.deepseek_v41.configuration import DeepseekV41Config
from ktransformers.models.deepseek_v41.modeling import DeepseekV41ForCausalLM

__all__ = ["DeepseekV41Config", "DeepseekV41ForCausalLM", "register"]


def register() -> None:
    """Make transformers' Auto classes know the family. Called again, it changes nothing."""
    AutoConfig.register(DeepseekV41Config.model_type, DeepseekV41Config, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
