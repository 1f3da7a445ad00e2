"""DSpark, the head of three layers that DeepSeek-V4-Flash-0731 drafts with: its facts, and the config of it as a model.

By DeepSeek's own inference code (DSparkBlock), as vLLM, SGLang and fastllm have it; the paper is arXiv 2607.05147:

    mtp.0.main_proj, main_norm               of the target's hidden states behind some layers, side by side
    mtp.K.*                                  a decoder layer of the model's class, with a window and experts
    mtp.LAST.norm, hc_head_*                 in front of the target's head
    mtp.LAST.markov_head.markov_w1, _w2      [V, rank] both: what the token before adds to logits
    mtp.LAST.confidence_head.proj            [1, H + rank]: the chance of a draft token, by which others end a draft
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ktransformers.errors import ConfigError
from ktransformers.models.composite import text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["MARKOV_HEAD", "DsparkFacts", "dspark_config", "has_dspark"]

MARKOV_HEAD = ".markov_head."
"""What no other layers for multi-token prediction have in their tensors' names."""

_LAYER = re.compile(r"(?:.*\.)?mtp\.(\d+)\.")


def has_dspark(stored: Iterable[str]) -> bool:
    """Whether tensors of these names are those of a DSpark head, or include them."""
    return any(MARKOV_HEAD in name for name in stored)


@dataclass(frozen=True, slots=True)
class DsparkFacts:
    """The numbers of a DSpark head.

    num_layers: of its own. block_size: draft tokens of a pass. noise_id: the token in the place of those that are not
    known yet. target_layers: layers of the model, ascending, behind which it takes hidden states. rank: of what the
    token before adds to logits.
    """

    num_layers: int
    block_size: int
    noise_id: int
    target_layers: tuple[int, ...]
    rank: int

    def num_spare_pages(self, page_size: int) -> int:
        """Return the pages of a cache that a block may reach behind those of its sequence."""
        return -(-self.block_size // page_size)

    @classmethod
    def of(cls, config: PretrainedConfig, stored: Iterable[str]) -> DsparkFacts:
        """Read them from a model's config and the names of its tensors. Raises ConfigError for numbers that are missing
        or that no such head has."""
        text = text_config_of(config)
        layers = {int(found[1]) for name in stored if (found := _LAYER.match(name))}
        if not layers or layers != set(range(len(layers))):
            raise ConfigError(f"the DSpark head has layers {sorted(layers)}: some of them are missing")
        targets: object = getattr(text, "dspark_target_layer_ids", None)
        known = range(int(text.num_hidden_layers))
        if not isinstance(targets, list | tuple) or not targets or any(layer not in known for layer in targets):
            raise ConfigError(
                f"the config says dspark_target_layer_ids {targets!r:.60}; numbers of some of the model's "
                f"{len(known)} layers are needed"
            )
        return cls(
            num_layers=len(layers),
            block_size=_number(text, "dspark_block_size", 1, None),
            noise_id=_number(text, "dspark_noise_token_id", 0, int(text.vocab_size) - 1),
            target_layers=tuple(sorted(set(targets))),
            rank=_number(text, "dspark_markov_rank", 1, None),
        )


def _number(config: PretrainedConfig, name: str, least: int, most: int | None) -> int:
    value: object = getattr(config, name, None)
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise ConfigError(f"the config says {name} {value!r:.40}; a whole number {bounds} is needed")
    return value


def dspark_config(config: PretrainedConfig, facts: DsparkFacts) -> PretrainedConfig:
    """Return the config of a model of the head's layers, for the model of `config`, which is a DeepSeek-V4.

    Its window is wider by a block: all rows of a block see it as a whole, and the positions in front of it that the
    model's window has, so that the last one sees so many more (engine/drafting/dspark.py).
    """
    made, count = copy.deepcopy(text_config_of(config)), facts.num_layers
    made.num_hidden_layers = count
    made.layer_types, made.mlp_layer_types = ["sliding_attention"] * count, ["moe"] * count
    made.sliding_window += facts.block_size
    made.num_nextn_predict_layers = 0
    made.tie_word_embeddings = False  # its head is a placeholder
    return made
