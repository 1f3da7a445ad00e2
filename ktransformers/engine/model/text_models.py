"""The class of `transformers` that a config's language model is built with, and the language part of composite models.

A checkpoint for images and text holds a text model like any other, under a longer name. Where `transformers` has a
causal class for its text config, that is taken; where it has only the text model, a head is put on it here.

    Glm4vMoeForConditionalGeneration        TextForCausalLM of Glm4vMoeTextModel
      model.visual            ...             (left out)
      model.language_model    Glm4vMoeTextModel --> model
      lm_head                 Linear            --> lm_head
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ktransformers.errors import UnsupportedError
from ktransformers.models.composite import VISION_EXPERTS
from ktransformers.models.layers import named_cache

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["causal_class"]

_DRAFT_HEADS = ("eagle", "medusa", "dflash", "dspark")
"""Kinds of heads that draft from another model's hidden states, as names of published classes have them."""


def causal_class(config: PretrainedConfig) -> type[PreTrainedModel]:
    """The class that predicts tokens by `config`, a text model's. Raises UnsupportedError where there is none, and for
    a checkpoint of nothing but a head for another model."""
    for name in config.architectures or ():
        if any(kind in name.lower() for kind in _DRAFT_HEADS):
            raise UnsupportedError(
                f"{name} is a head that drafts from the hidden states of another model, and is not run from files of "
                "its own; --draft_model takes a small model with the same tokenizer, --speculative ngram none"
            )
    from transformers import GenerationMixin
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        known: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return known
    classes, composites = _classes_of(config), MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()
    causal = [one for one in classes if one.__name__.endswith("ForCausalLM") and one.config_class is type(config)]
    text = [one for one in classes if one.__name__.endswith("TextModel") and one.config_class is type(config)]
    whole = [one for one in classes if one.__name__ in composites]
    if not whole:
        text = []  # of an encoder of text, say
    elif not causal and not any(issubclass(one, GenerationMixin) for one in whole):
        raise UnsupportedError(
            f"model type {config.model_type} does not generate token by token ({whole[0].__name__}: by diffusion, say)"
        )
    if not causal and not text:
        raise UnsupportedError(f"model type {config.model_type} is no language model that answers in text")
    return causal[0] if causal else _with_head(text[0])


def _classes_of(config: PretrainedConfig) -> list[type[PreTrainedModel]]:
    """Models in the module of transformers that belongs to a config's own."""
    from transformers import PreTrainedModel

    where = type(config).__module__
    if not where.startswith("transformers.models.") or ".configuration_" not in where:
        return []
    module = importlib.import_module(where.replace(".configuration_", ".modeling_"))
    found = [one for one in vars(module).values() if isinstance(one, type) and issubclass(one, PreTrainedModel)]
    return [one for one in found if one.__module__ == module.__name__]


def _with_head(text_model: type[PreTrainedModel]) -> type[PreTrainedModel]:
    family: Any = text_model.__bases__[0]  # knows how its modules are initialized, and what attention they allow

    class TextForCausalLM(family):  # type: ignore[misc]
        """A text model and a head, which makes of every composite of transformers what a causal class would be."""

        base_model_prefix = "model"
        config_class = text_model.config_class
        _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as transformers has it

        def __init__(self, config: PretrainedConfig):
            super().__init__(config)
            self.model = text_model(config)
            for module in list(self.model.modules()):
                if VISION_EXPERTS in module._modules and not getattr(config, "has_vision_moe", False):
                    delattr(module, VISION_EXPERTS)  # no token of text reaches them
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(
            self,
            input_ids: torch.Tensor | None = None,
            logits_to_keep: int | torch.Tensor = 0,
            past_key_values: object = None,
            **kwargs: object,
        ) -> object:
            """Run the model as the causal classes of transformers do. input_ids int64 [B, T], or inputs_embeds; logits
            to keep."""
            from transformers.modeling_outputs import CausalLMOutputWithPast

            outputs = self.model(input_ids=input_ids, **named_cache(self.model, past_key_values), **kwargs)
            hidden_states = outputs.last_hidden_state
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(hidden_states[:, keep, :]) * getattr(self.config, "output_multiplier", 1.0)
            logits = logits / getattr(self.config, "logits_scaling", 1.0)
            bound = getattr(self.config, "final_logit_softcapping", None)
            logits = logits if bound is None else bound * torch.tanh(logits / bound)
            return CausalLMOutputWithPast(logits=logits)  # who wants the cache has handed it in

    TextForCausalLM.__name__ = f"{text_model.__name__.removesuffix('Model')}ForCausalLM"
    return TextForCausalLM
