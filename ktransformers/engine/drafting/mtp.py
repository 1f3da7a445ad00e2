"""The target's own layer for multi-token prediction as drafter, see engine/model/mtp.py. It runs on the CPU.

Its embedding and its head are the target's modules: neither is in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.draft_model import ids_of, run_pieces
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, Piece
from ktransformers.engine.model.mtp import INPUT_NORMS, PROJECTION, MtpInput
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner

__all__ = ["MtpForward", "MtpModules"]


@dataclass(frozen=True, slots=True)
class MtpModules:
    """The modules that make a layer's input, found before operators take their places. layer: which has them as
    children; entry: where the input goes."""

    layer: nn.Module
    entry: MtpInput

    @classmethod
    def of(cls, model: Any) -> Self:
        """Find them in a skeleton that is as `build_mtp` left it."""
        return cls(model.model.layers[0], model.model.embed_tokens)

    def project(self, embeddings: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the decoder layer's input, [1, T, H], of embeddings and hidden states of that shape."""
        enorm, hnorm = (getattr(self.layer, name) for name in INPUT_NORMS)
        both = torch.cat([enorm(embeddings), hnorm(hidden_states)], dim=-1)
        rows: torch.Tensor = getattr(self.layer, PROJECTION)(both)
        return rows


class MtpForward:
    """The DraftForward of a layer for multi-token prediction.

    runner: of its model, whose head gives the hidden states behind the layer's norm. target: the forward of the target,
    with a tap.
    """

    shift = 1

    def __init__(
        self, runner: ModelRunner, cache: PagedCache, limits: DraftLimits, modules: MtpModules, target: ForwardPass
    ) -> None:
        assert target.tap is not None, "nothing keeps the target's hidden states"
        self._runner, self._cache, self.limits, self._modules = runner, cache, limits, modules
        layout, model = target.layout, target.model
        self._tap, inner = target.tap, getattr(model.base_model, "inner", model.base_model)
        self._embedding = inner.get_input_embeddings() if layout is None else layout.embedding
        self._head, self._last = model.lm_head, None if layout is None else layout.last

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece], *, wants_output: bool) -> DraftOutput | None:
        """Run a step, see DraftForward. The logits are good until the next one."""
        token_ids = ids_of(pieces)
        hidden = torch.cat([piece.hidden_states for piece in pieces if piece.hidden_states is not None])
        assert len(hidden) == len(token_ids), "pieces of an MTP layer have hidden states"
        embeddings = self._embedding(token_ids[None]).to("cpu", torch.float32)
        self._modules.entry.rows = self._modules.project(embeddings, hidden[None])
        behind = run_pieces(self._runner, self._cache, pieces, token_ids, wants_output=wants_output)
        if not wants_output:
            return None
        behind = behind.clone()
        rows = behind[None] if self._last is None else self._last.to_device(behind[None])
        return DraftOutput(self._head(rows)[0].to("cpu", torch.float32), behind)

    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states, see DraftForward."""
        return self._tap.rows(first, count)
