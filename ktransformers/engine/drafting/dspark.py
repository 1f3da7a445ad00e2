"""DSpark's head as drafter: one pass gives the logits of a block of draft tokens, each corrected by the one before.

    positions   ... p - W + 1 ........... p | p + 1 ....... p + B        W window, B block_size
                keys of the target's        | last token, noise, noise ...
                hidden states               |
                    └── all rows of the block see all of these ──┘       row i says what comes behind p + 1 + i

That each row sees the block to its end, and as far back as the first one, is said by the lengths of what rows see: they
all see up to p + B, by a window of W + B positions, whatever position they are turned to. Keys of a block are
overwritten when its tokens are known.

A block may end behind the sequence's pages, which end with the draft tokens that were asked for: pages that no sequence
has stand there (`DsparkFacts.num_spare_pages`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.engine.drafting.draft_model import scheduled_row
from ktransformers.engine.drafting.drafter import DraftLimits, DraftOutput, LogitsRequest, Pages, Piece, packed
from ktransformers.engine.model.dspark import DsparkInput
from ktransformers.engine.step.context import ForwardBatch, paged_context
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.runner import ModelRunner
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import CPU

__all__ = ["DsparkForward"]


class DsparkForward:
    """The DraftForward of a DSpark head.

    runner: of its model, whose embedding and head are the target's. cache: its own, with spare pages behind num_pages
    ones of the target's. limits: but for what a block takes. entry: the placeholder for the embedding in its model.
    own, target: the forward passes of both; that of the target has a hook that keeps hidden states.
    """

    shift, is_fixed = 1, False

    def __init__(
        self,
        runner: ModelRunner,
        cache: PagedCache,
        limits: DraftLimits,
        entry: DsparkInput,
        own: ForwardPass,
        target: ForwardPass,
        num_pages: int,
    ) -> None:
        assert target.last_hidden is not None, "nothing keeps the target's hidden states"
        self._runner, self._cache, self._entry, self._own = runner, cache, entry, own
        self._target_hidden, self._num_pages = target.last_hidden, num_pages
        self._block_size = entry.facts.block_size
        self.limits = replace(limits, longest=max(limits.longest - self._block_size, 0))
        self._layers = [one for one in own.model.modules() if isinstance(one, KCompressedAttention)]
        self._device = CPU if own.layout is None else own.layout.entry
        self._logits: dict[int, torch.Tensor] = {}  # of each sequence's latest block, fp32 [B, V] on the CPU

    @torch.inference_mode()
    def run(
        self, pieces: Sequence[Piece], requests: Sequence[LogitsRequest], behind: Sequence[int] = (), depth: int = 0
    ) -> DraftOutput:
        """Run a step, see DraftForward: with depth 0 the keys of what the target has computed, and the blocks of those
        with a request; behind that nothing but what the token before adds to logits that are there."""
        if not depth:
            self._keep_context(pieces)
            pieces = [piece for piece, request in zip(pieces, requests, strict=True) if request is not None]
            for group in packed([self._block_size] * len(pieces), self._rows_of_a_step):
                self._run_blocks([pieces[i] for i, _, _ in group])
        if not pieces:
            return DraftOutput(torch.empty(0, self.limits.vocab_size))
        before = torch.tensor([piece.token_ids[-1] for piece in pieces])
        rows = torch.stack([self._logits[piece.run_id][depth] for piece in pieces])
        return DraftOutput(rows.add_(self._entry.correction(before)))

    @property
    def _rows_of_a_step(self) -> int:
        """Whole blocks alone."""
        return max(self.limits.max_rows // self._block_size, 1) * self._block_size

    def _keep_context(self, pieces: Sequence[Piece]) -> None:
        """Write the keys of the positions that the target has computed."""
        given = [piece.hidden_states for piece in pieces if piece.hidden_states is not None]
        hidden = torch.cat(given) if len(given) > 1 else given[0]
        rows = [scheduled_row(piece, is_sampled=False) for piece in pieces]
        positions, context = paged_context(self._cache, self._own.pool, rows, [piece.pages for piece in pieces])
        base = self._own.model.base_model
        rotation = getattr(base, "inner", base).rotary_emb
        with self._own.math:
            if self._own.layout is not None:
                positions = self._device.move(positions)
                context = context.replicated(device.torch_device for device in self._own.layout.devices)
            made = self._entry.context(hidden)
            cos, sin = rotation(made, position_ids=positions[None], layer_type="main")
            for layer in self._layers:
                layer.keep_keys(made, (cos[0], sin[0]), context)

    def _run_blocks(self, pieces: Sequence[Piece]) -> None:
        """Run the block behind each piece, whose last token begins it."""
        noise = [self._entry.facts.noise_id] * (self._block_size - 1)
        blocks = [
            replace(piece, start=piece.end, token_ids=[piece.token_ids[-1], *noise], hidden_states=None)
            for piece in pieces
        ]
        rows = [scheduled_row(block, is_sampled=True) for block in blocks]
        positions, context = paged_context(self._cache, self._own.pool, rows, self._tables(blocks))
        token_ids = torch.tensor([token for block in blocks for token in block.token_ids])
        batch = ForwardBatch(token_ids, positions, self._seeing_blocks(context, blocks), torch.arange(len(token_ids)))
        logits = self._runner.step(batch)
        for piece, part in zip(pieces, torch.split(logits, self._block_size), strict=True):
            self._logits[piece.run_id] = part.clone()

    def _seeing_blocks(self, context: ForwardContext, blocks: Sequence[Piece]) -> ForwardContext:
        """Let all rows of a block see it to its end."""
        ends = torch.tensor([block.end for block in blocks], dtype=torch.int32)
        return replace(context, kv_lens=ends.repeat_interleave(self._block_size))

    def _tables(self, blocks: Sequence[Piece]) -> list[Pages]:
        """The pages of each block's sequence, with spare ones as far as it has none."""
        spare, tables = itertools.count(self._num_pages), list[Pages]()
        for block in blocks:
            missing = -(-block.end // self._cache.page_size) - len(block.pages)
            more = [next(spare) for _ in range(missing)]
            tables.append(np.concatenate([block.pages, np.array(more, dtype=np.int32)]) if more else block.pages)
        return tables

    def drop_held(self) -> None:
        """Do nothing: no step is launched before it is asked for."""

    @torch.inference_mode()
    def hidden_states(self, first: int, count: int) -> torch.Tensor | None:
        """Return a copy of the target's hidden states, see DraftForward."""
        return self._device.to_device(self._target_hidden.rows(first, count))

    def forget(self, run_ids: Iterable[int] | None) -> None:
        """Forget the latest blocks of sequences, of all for None."""
        for run_id in list(self._logits) if run_ids is None else run_ids:
            self._logits.pop(run_id, None)
