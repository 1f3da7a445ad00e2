"""DeepSeek-V4.1 (`deepseek_v41`), of which transformers has no class: config, modules on `meta`, hashes of n-grams.

`register` makes transformers' Auto classes know it, so that it is opened, planned and loaded like any other family.
"""

from __future__ import annotations

__all__ = ["MODEL_TYPE", "register"]

MODEL_TYPE = "deepseek_v41"


def register() -> None:
    """Make transformers' Auto classes know the family. Called again, it changes nothing."""
    # Here, so that whoever runs other models does not wait for these modules.
    from transformers import AutoConfig, AutoModelForCausalLM

    from ktransformers.models.deepseek_v41.configuration import DeepseekV41Config
    from ktransformers.models.deepseek_v41.modeling import DeepseekV41ForCausalLM

    AutoConfig.register(MODEL_TYPE, DeepseekV41Config, exist_ok=True)
    AutoModelForCausalLM.register(DeepseekV41Config, DeepseekV41ForCausalLM, exist_ok=True)
