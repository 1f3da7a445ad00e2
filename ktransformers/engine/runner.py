"""Runs one step of a loaded model over the static cache. Does not know prompts, text or sampling."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ktransformers.cache.static import StaticCache
from ktransformers.engine.context import static_context
from ktransformers.engine.decode import DecodeSteps, StepInputs
from ktransformers.engine.hidden import HiddenTap
from ktransformers.engine.layout import StepLayout
from ktransformers.errors import ConfigError, ContextLengthError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.context import ForwardContext
from ktransformers.operators.device import CPU
from ktransformers.operators.exact import NativeMathMode, modules_on_torch

__all__ = ["ModelRunner", "StaticRunner", "StepInputs"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """A loaded model, one flattened step at a time. Whose tokens they are is in the context.

    layout: the devices of its layers; the CPU alone when None. decode: how steps of few rows run on a GPU, once they
    are prepared; like all others when None. announce: whether modules that keep torch's forward get a line in the log.
    tap: for the hidden states behind the logits.
    """

    decode: DecodeSteps | None = None

    def __init__(self, model: Any, pool: WorkerPool, layout: StepLayout | None = None, *, announce: bool = True):
        self.layout = None if layout is None or layout.is_cpu else layout
        left = modules_on_torch(model) if self.layout is None or CPU in self.layout.devices else []
        if left and announce:
            logger.info("%s and %d more modules keep their forward, on native products", left[0], len(left) - 1)
        self._math: AbstractContextManager[Any] = NativeMathMode(pool) if left else nullcontext()
        self.model, self.pool = model, pool
        self.tap = HiddenTap(model)

    @torch.inference_mode()
    def step(
        self, token_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext, keep: torch.Tensor
    ) -> torch.Tensor:
        """One flattened step of any sequences: int64 [T] ids and positions, int64 [N] rows to keep.

        Everything comes and goes on the CPU. Returns their logits, fp32 [N, vocab_size], valid until the next step.
        Checks nothing: `forward` does for one sequence.
        """
        if self.layout is not None:
            return self._gpu_step(self.layout, token_ids, positions, context, keep)
        with self._math:
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                logits_to_keep=keep,
                forward_context=context,
            )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _gpu_step(
        self,
        layout: StepLayout,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        keep: torch.Tensor,
    ) -> torch.Tensor:
        if self.decode is not None and len(token_ids) <= self.decode.max_rows and not self.tap.is_open:
            hidden_states = layout.embedding(token_ids[None])[0]
            logits = self.decode.step(hidden_states, positions, context, keep)
        else:
            logits = self.run(self.inputs_of(layout, token_ids, positions, context, keep)).to("cpu", torch.float32)
        layout.check_experts()
        return logits

    @torch.inference_mode()
    def inputs_of(
        self,
        layout: StepLayout,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
        keep: torch.Tensor,
    ) -> StepInputs:
        """Bring a step to the GPU: rows are looked up where the table is, then everything moves once."""
        return StepInputs(
            hidden_states=layout.entry.take(layout.embedding(token_ids[None])),
            positions=layout.entry.move(positions[None]),
            keep=layout.last.move(keep),
            context=context.replicated(device.torch_device for device in layout.devices),
        )

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> torch.Tensor:
        """The model's forward on inputs that are on the GPU: logits [N, vocab_size] there. What a graph captures."""
        with self._math:
            output = self.model(
                inputs_embeds=inputs.hidden_states,
                position_ids=inputs.positions,
                use_cache=False,
                logits_to_keep=inputs.keep,
                forward_context=inputs.context,
            )
        logits: torch.Tensor = output.logits[0]
        return logits


class StaticRunner(ModelRunner):
    """One sequence of at most max_len tokens, whose keys and values live in a StaticCache.

    is_models_limit: the model takes no more tokens, so that a larger cache would not help.
    """

    def __init__(
        self,
        model: Any,
        cache: StaticCache,
        pool: WorkerPool,
        vocab_size: int,
        layout: StepLayout | None = None,
        is_models_limit: bool = False,
    ):
        super().__init__(model, pool, layout)
        self.cache, self.is_models_limit = cache, is_models_limit
        self.vocab_size = vocab_size
        self.written_len = 0  # positions whose keys and values are in the cache

    @property
    def max_len(self) -> int:
        """Most tokens of the sequence, prompt and answer together."""
        return self.cache.max_len

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        """Run `token_ids` at positions start, start + 1, ..., overwriting what the cache holds from there on.

        keep are indices into token_ids; the result is their logits, fp32 [len(keep), vocab_size].
        Raises ContextLengthError when the tokens do not fit, ConfigError for ids outside the vocabulary and for a
        start that would leave a gap.
        """
        end = start + len(token_ids)
        if end > self.max_len:
            raise ContextLengthError(
                f"{end} tokens do not fit into the cache of {self.max_len}"
                + ("" if self.is_models_limit else "; raise --cache_lens"),
                prompt_len=end,
                max_len=self.max_len,
            )
        if not 0 <= start <= self.written_len:
            raise ConfigError(f"start {start} would leave a gap: {self.written_len} positions are written")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= self.vocab_size:
            raise ConfigError(f"token ids must be in [0, {self.vocab_size}) and at least one")
        self.written_len = start  # should the forward fail, what it overwrote is gone
        context = static_context(self.cache, self.pool, start, len(token_ids))
        logits = self.step(
            torch.tensor(list(token_ids)),
            torch.arange(start, end),
            context,
            torch.tensor(list(keep), dtype=torch.int64),
        )
        self.written_len = end
        return logits
