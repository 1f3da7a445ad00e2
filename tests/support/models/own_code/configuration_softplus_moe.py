"""Config of a family that transformers does not know; it comes with the model, as modeling_softplus_moe.py does."""

from transformers import MixtralConfig


class SoftplusMoeConfig(MixtralConfig):
    model_type = "softplus_moe"
