"""The target's own layer for multi-token prediction as drafter, see engine/model/mtp.py, or Gemma 4's assistant, see
engine/model/assistant.py.

Its embedding and its head are the target's modules, an assistant's embedding alone: none is in memory twice. Both stand
in its model, so that a step takes tokens and ends in logits, as any model's; hidden states are put where it reads them
before it runs. On a GPU those of the target's last layer stay there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.draft_model import PieceSteps
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, LogitsRequest, Piece
from ktransformers.engine.model.mtp import MtpInput
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.operators.device import CPU

__all__ = ["MtpForward"]


class MtpForward:
    """The DraftForward of a layer for multi-token prediction, or of an assistant.

    runner: of its model, whose head is the target's. own, target: the forward passes of both, with a hook that keeps
    hidden states. entry: the placeholder for the embedding in its model, which has the target's. is_fixed: see
    DraftForward. number: of the layer, among several; the token of an entry is so many further than the next one.
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
        *,
        is_fixed: bool = False,
        number: int = 0,
    ) -> None:
        assert target.last_hidden is not None, "nothing keeps the target's hidden states"
        assert own.last_hidden is not None, "nothing keeps the layer's hidden states"
        ahead = 0 if is_fixed else 1 + number  # an assistant's token is none of a prompt, and has no place of its own
        self._steps = PieceSteps(runner, cache, self._go_on, is_fixed=is_fixed, ahead=ahead)
        self.is_fixed, self.limits, self._entry = is_fixed, limits, entry
        self._target_hidden, self._own_hidden = target.last_hidden, own.last_hidden
        self._device = CPU if own.layout is None else own.layout.entry

    @torch.inference_mode()
    def run(
        self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int] = (), depth: int = 0
    ) -> DraftOutput:
        """Run a step, see DraftForward."""
        if not self._steps.has_held:  # else they are where it reads them
            self._entry.give([piece.hidden_states for piece in pieces if piece.hidden_states is not None])
        logits, kept = self._steps.run(pieces, requests, behind)
        return DraftOutput(logits, self._returned(kept) if kept and not self._steps.has_held else None)

    def own_rows(self, count: int) -> torch.Tensor:
        """Return a copy of what its last step made of its first `count` rows, [count, H] where it is."""
        return self._own_hidden.rows(0, count)

    def _go_on(self, rows: list[int]) -> None:
        self._entry.give([self._returned(rows)])

    def _returned(self, rows: list[int]) -> torch.Tensor:
        return self._entry.returned(self._own_hidden.rows_at(rows))

    def drop_held(self) -> None:
        """Give up what was launched of a next step, see DraftForward."""
        self._steps.drop_held()

    @torch.inference_mode()
    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states, see DraftForward."""
        return self._device.to_device(self._target_hidden.rows(first, count))

    def forget(self, run_ids: Iterable[int] | None) -> None:
        """Do nothing: it keeps nothing of single sequences."""
