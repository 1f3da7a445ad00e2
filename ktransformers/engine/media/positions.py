"""Rotary positions of prompts with pictures, in three axes (M-RoPE): transformers' own `get_rope_index`, asked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch

from ktransformers.errors import MODULE_FAILURES, EngineError, named_reason
from ktransformers.media.records import is_media_id

__all__ = ["RopeIndex"]

_IMAGE = 1  # of mm_token_type_ids; text is 0
_IMAGE_TOKENS = ("image_token_id", "image_token_index")


class RopeIndex:
    """Positions by the `get_rope_index` of a composite, which reads its config and no modules.

    host: the part of the composite that may have it; one without numbers all positions through.
    """

    def __init__(self, host: object):
        self._index: Callable[..., object] | None = getattr(host, "get_rope_index", None)
        names = () if self._index is None else inspect.signature(self._index).parameters
        self.names = frozenset(names) - {"input_ids", "mm_token_type_ids", "attention_mask", "kwargs"}
        """Names of the tensors of pictures that it wants."""
        tokens = (getattr(getattr(host, "config", None), name, None) for name in _IMAGE_TOKENS)
        self._image_token = next((token for token in tokens if isinstance(token, int)), 0)

    @property
    def is_numbered_through(self) -> bool:
        """Whether positions are 0 to T - 1, whatever they show."""
        return self._index is None

    def of(self, token_ids: Sequence[int], tensors: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
        """Return int64 [3, T]. tensors: those of `names`, of each picture in order. Raises EngineError."""
        assert self._index is not None
        ids = torch.tensor(token_ids, dtype=torch.int64)
        is_shown = torch.tensor([is_media_id(token) for token in token_ids])
        ids[is_shown] = self._image_token
        types = is_shown.int() * _IMAGE
        wanted = {name: [each[name] for each in tensors if name in each] for name in sorted(self.names)}
        given = {name: torch.cat(parts) for name, parts in wanted.items() if parts}
        try:
            found = self._index(ids[None], mm_token_type_ids=types[None], **given)
            positions = found[0] if isinstance(found, tuple) else found
            assert isinstance(positions, torch.Tensor), f"they are a {type(positions).__name__}"
        except MODULE_FAILURES as error:
            raise EngineError(f"the model's positions of pictures fail: {named_reason(error)}") from error
        if positions.shape != (3, 1, len(ids)):
            raise EngineError(
                f"the model's positions of pictures have the shape {tuple(positions.shape)}, not [3, 1, T]"
            )
        return positions[:, 0].to(torch.int64)
