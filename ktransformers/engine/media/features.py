"""What a tower gives for a picture, and who computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ktransformers.engine.media.family import PictureFamily
from ktransformers.media.records import MediaItem

__all__ = ["PictureEncoder", "PictureFeatures"]


@dataclass(frozen=True, slots=True)
class PictureFeatures:
    """The hidden states of a picture's positions, in their order.

    hidden: [N, H], in place of what the embedding has for tokens, on the CPU in fp32 or on a GPU in its type. by_layer:
    [N, H] each, added to the hidden states of these positions behind the layers of these numbers (deepstack); -1: in
    front of the first. seconds: that the tower took for it; 0 where it is known from before.
    """

    hidden: torch.Tensor
    by_layer: Mapping[int, torch.Tensor] = field(default_factory=dict)
    seconds: float = 0.0


class PictureEncoder(Protocol):
    """Computes what a loaded model's tower gives. Each picture once, as far as its memory goes."""

    @property
    def family(self) -> PictureFamily:
        """What the model does with the positions of pictures besides showing them."""
        ...

    def features(self, digest: bytes) -> PictureFeatures:
        """Return the features of a picture that is in the store. Raises EngineError for one that is not."""
        ...

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        """Return the rotary positions of a prompt, int64 [3, T]: time, height and width (M-RoPE). Behind it each token
        is one further than the largest of them. None: positions are 0 to T - 1, whatever they show.

        token_ids: of the whole prompt, with the pseudo-ids of `media`.
        """
        ...
