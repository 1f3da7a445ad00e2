"""DSpark's head, as a model of some decoder layers, and the projections beside them.

    context    main_norm(main_proj(hidden states of the target, of several layers side by side)) ── keys of every layer
    block      [last token, noise ...] ── the target's embedding ── decoder layers ── mixer, norm ── the target's head

The layers are those of the family's class of transformers, so that rules replace them as in any model; what they attend
to is up to who runs them (engine/drafting/dspark.py). Numbers and names of tensors: models/dspark_config.py. The
confidence head is not read: how many draft tokens pay is found by counting (docs/speculative.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from typing_extensions import override

from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.model.skeleton import build_skeleton
from ktransformers.models.dspark_config import DsparkFacts
from ktransformers.operators.partial_sums import PassThrough

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["DsparkInput", "build_dspark", "dspark_names"]

_PROJECTION, _NORM, _TABLE, _MARKOV = "main_proj", "main_norm", "markov_table", "markov_proj"
_LAYER = re.compile(r"(?:.*\.)?mtp\.(\d+)\.(.+)")
_OF_FIRST = "model.layers.0."
_RENAMED = {
    "norm.": "model.norm.",
    "hc_head_": "model.hc_head.hc_",
    "markov_head.markov_w1.": f"{_OF_FIRST}{_TABLE}.",
    "markov_head.markov_w2.": f"{_OF_FIRST}{_MARKOV}.",
}
_UNUSED = ("confidence_head.", "emb.", "embed.", "head.", "embed_tokens.", "shared_head.")
"""Of files: what is not read, and copies of the target's embedding and head."""


def dspark_names(stored: Iterable[str]) -> dict[str, str]:
    """Return {stored name: name in the model of `build_dspark`} of a checkpoint's tensors."""
    found = dict[str, str]()
    for name in stored:
        match = _LAYER.fullmatch(name)
        if match is None or match[2].startswith(_UNUSED):
            continue
        prefix = next((one for one in _RENAMED if match[2].startswith(one)), None)
        usual = f"model.layers.{match[1]}.{match[2]}"
        found[name] = usual if prefix is None else _RENAMED[prefix] + match[2].removeprefix(prefix)
    return found


class DsparkInput(MtpInput):
    """The placeholder for the embedding of a DSpark head, which is the target's; holds what it has beside its layers.

    facts: of the head. layer: has its projections as children until `take_parts`.
    """

    def __init__(self, layer: nn.Module, hidden_size: int, facts: DsparkFacts):
        super().__init__(layer, hidden_size, (_PROJECTION, _NORM, _TABLE, _MARKOV))
        self.facts = facts

    def context(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return what keys are made of, [1, T, H], of the target's hidden states [T, layers H] where the head is."""
        projected = self.get_submodule(_PROJECTION)(hidden_states[None])
        made: torch.Tensor = self.get_submodule(_NORM)(projected)
        return made

    def correction(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return what tokens int64 [N] add to the logits behind them: fp32 [N, V] on the CPU."""
        rows = self.get_submodule(_TABLE)(token_ids[None])
        made: torch.Tensor = self.get_submodule(_MARKOV)(rows)[0]
        return made.to("cpu", torch.float32)

    @override
    def project(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded


def build_dspark(config: PretrainedConfig, facts: DsparkFacts, trust_remote_code: bool) -> PreTrainedModel:
    """Build the skeleton of a DSpark head, whose embedding and head are placeholders. config: of
    `models.dspark_config`."""
    model, size = build_skeleton(config, trust_remote_code), int(config.hidden_size)
    layer, norm = model.get_submodule("model.layers.0"), model.get_submodule("model.norm")
    vocab_size = int(config.vocab_size)
    with torch.device("meta"):
        layer.add_module(_PROJECTION, nn.Linear(len(facts.target_layers) * size, size, bias=False))
        layer.add_module(_NORM, type(norm)(size, eps=config.rms_norm_eps))
        layer.add_module(_TABLE, nn.Embedding(vocab_size, facts.rank))
        layer.add_module(_MARKOV, nn.Linear(facts.rank, vocab_size, bias=False))
    model.set_input_embeddings(DsparkInput(layer, size, facts))
    model.add_module("lm_head", PassThrough())  # it is the target's own
    built: PreTrainedModel = model.eval()
    return built
