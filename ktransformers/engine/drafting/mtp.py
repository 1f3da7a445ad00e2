"""The target's own layer for multi-token prediction as drafter, see engine/model/mtp.py.

Its embedding and its head are the target's modules: neither is in memory twice. The head stands in its model, so that a
step ends in logits; what makes its input of embeddings and hidden states runs with the step, too. On a GPU, hidden
states of the target's last layer stay there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.draft_model import ids_of, last_rows, run_pieces
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, LogitsRequest, Piece
from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.lookup import TokenLookup
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.operators.device import CPU

__all__ = ["MtpForward"]


class MtpForward:
    """The DraftForward of a layer for multi-token prediction.

    runner: of its model, whose head is the target's. own, target: the forward passes of both, with a hook that keeps
    hidden states. entry: the placeholder for the embedding in its model.
    """

    shift = 1

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedCache,
        limits: DraftLimits,
        entry: MtpInput,
        own: ForwardPass,
        target: ForwardPass,
    ) -> None:
        assert target.last_hidden is not None, "nothing keeps the target's hidden states"
        assert own.last_hidden is not None, "nothing keeps the layer's hidden states"
        self._runner, self._cache, self.limits, self._entry = runner, cache, limits, entry
        self._target_hidden, self._own_hidden = target.last_hidden, own.last_hidden
        self._device = CPU if own.layout is None else own.layout.entry
        self._look_up = _look_up(target, own)

    @torch.inference_mode()
    def run(self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest]) -> DraftOutput:
        """Run a step, see DraftForward."""
        token_ids = ids_of(pieces)
        hidden = torch.cat([piece.hidden_states for piece in pieces if piece.hidden_states is not None])
        assert len(hidden) == len(token_ids), "pieces of an MTP layer have hidden states"
        self._entry.rows = torch.cat([self._look_up(token_ids), hidden], dim=-1)[None]
        logits = run_pieces(self._runner, self._cache, pieces, token_ids, requests)
        ends = last_rows(pieces, requests)
        return DraftOutput(logits, self._own_hidden.rows_at(ends) if ends else None)

    @torch.inference_mode()
    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states, see DraftForward."""
        return self._device.to_device(self._target_hidden.rows(first, count))


def _look_up(target: ForwardPass, own: ForwardPass) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the target's embedding: int64 [T] on the CPU -> [T, H] where the layer is."""
    if target.layout is not None and own.layout is not None:
        return TokenLookup(replace(target.layout, entry=own.layout.entry))
    base = target.model.base_model
    inner = getattr(base, "inner", base)
    embedding = inner.get_input_embeddings() if target.layout is None else target.layout.embedding

    def look_up(token_ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = embedding(token_ids[None])[0]
        return rows.to("cpu", torch.float32)

    return look_up
