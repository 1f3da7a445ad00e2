"""What the oracles of layers for multi-token prediction share whose hidden states are streams: they go in side by side,
and come out as they are in front of what brings them together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

__all__ = ["StreamLayer", "StreamMtp"]


class StreamLayer(nn.Module):
    """Parts of a layer, and a model that is its decoder layer. mixer: the module of the model that brings streams
    together."""

    model: PreTrainedModel
    mixer: str

    def joined(self, embeddings: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """What goes into the decoder layer, of [1, T, H] and streams."""
        raise NotImplementedError

    def forward(self, embeddings: torch.Tensor, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, T, H] and streams -> hidden states behind the last norm, and the streams that the layer makes."""
        base: Any = self.model.model
        joined, seen = self.joined(embeddings, streams), list[torch.Tensor]()
        hooks = [
            base.layers[0].register_forward_pre_hook(lambda module, args: (joined, *args[1:])),
            base.get_submodule(self.mixer).register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        ]
        normed = base(inputs_embeds=embeddings).last_hidden_state
        for hook in hooks:
            hook.remove()
        return normed, seen[0]


@dataclass
class StreamMtp:
    """main: the model. layer: for multi-token prediction. Both are in fp32."""

    main: PreTrainedModel
    layer: StreamLayer

    @torch.no_grad()
    def drafts(self, token_ids: list[int], count: int) -> list[torch.Tensor]:
        """Logits [V] of the next tokens but one, ..., each behind the likeliest one before: of a sequence whose last
        token the main model has sampled and not computed."""
        base: Any = self.main.model
        states: list[torch.Tensor] = []
        hook = base.get_submodule(self.layer.mixer).register_forward_pre_hook(
            lambda module, args: states.append(args[0])
        )
        base(torch.tensor([token_ids[:-1]]))
        hook.remove()
        streams, known, found = states[0], list(token_ids[1:]), list[torch.Tensor]()
        for _ in range(count):
            normed, behind = self.layer(base.embed_tokens(torch.tensor([known])), streams)
            found.append(self.main.lm_head(normed[0, -1]))
            known.append(int(found[-1].argmax()))
            streams = torch.cat([streams, behind[:, -1:]], dim=1)
        return found
