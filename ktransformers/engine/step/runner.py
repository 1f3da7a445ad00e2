"""Runs one step of a loaded model. Does not know prompts, text or sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch

from ktransformers.engine.sampling.logits_request import StepLogits
from ktransformers.engine.step.broadcast import SharedStep, StepBroadcast
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.decode import DecodeSteps
from ktransformers.engine.step.forward import ForwardPass
from ktransformers.engine.step.gpu_profile import GpuProfile
from ktransformers.engine.step.hidden import HiddenStatesHook
from ktransformers.errors import EngineError
from ktransformers.kernels.cpu.expert_store import ReadError

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """Runs a loaded model, one flattened step at a time. Whose tokens they are is in the context.

    decode: how steps that can be replayed run on GPUs; like all others when None. hook: for the hidden states behind
    the logits. broadcast: given each step before it runs, where other processes have to run it, too. begins_ahead:
    whether these may begin steps while this one runs others: they are stages before it. send_output: called with the
    rows of each step that this process follows, for a stage that gives hidden states to the next one.

    meanwhile: called once for each time it is set: in a step on GPUs between its launch and its end, in one on the CPU
    before its layers, when Python is left to others for long.
    """

    meanwhile: Callable[[], None] | None = None

    def __init__(
        self,
        forward_pass: ForwardPass,
        decode: DecodeSteps | None = None,
        broadcast: StepBroadcast | None = None,
        *,
        begins_ahead: bool = False,
        send_output: Callable[[int], None] | None = None,
    ):
        self._broadcast, self._is_apart, self._send_output = broadcast, False, send_output
        self.begins_ahead, self._num_begun = begins_ahead, 0
        self._pass, self._decode = forward_pass, decode
        self.model, self.pool = forward_pass.model, forward_pass.pool
        self.hook = HiddenStatesHook(forward_pass.model)
        self._profile: GpuProfile | None = None
        self._held_rows = self._unfinished_rows = 0
        self._is_padded = False  # the step under way

    @property
    def runs_apart(self) -> bool:
        """Whether steps are computed by GPUs, while this process has time for `meanwhile`."""
        return self._pass.layout is not None and not self.begins_ahead

    @property
    def held_steps(self) -> ModelRunner | None:
        """Itself, where it may launch steps before their tokens are known."""
        return self if self.runs_apart else None

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> torch.Tensor:
        """Run one flattened step of any sequences.

        Returns logits of the rows in `keep`, fp32 [N, vocab_size] on the CPU, valid until the next step. Checks
        nothing.
        """
        logits = self.reduced_step(batch, None)
        assert isinstance(logits, torch.Tensor)
        return logits

    @torch.inference_mode()
    def reduced_step(self, batch: ForwardBatch, needs: Sequence[int] | None) -> StepLogits:
        """Run a step as `step` does; a row's need (engine.sampling.logits_request) may be all that comes back of it.
        None: whole rows.

        Steps that are not replayed, or are on the CPU, give whole rows: they take long beside copying them.
        """
        forward, layout, num_rows = self._pass, self._pass.layout, len(batch)
        forward.pool.begin_step(num_rows)
        if forward.last_hidden is not None:
            forward.last_hidden.begin()
        if layout is None:
            self._begin_step(batch, is_padded=False)
            whole = forward.on_cpu(batch, self._take_meanwhile())
            self._is_apart = False
            return whole
        decode = None if self.hook.is_open else self._decode
        if decode is not None and not decode.takes(batch):
            decode = None
        self._is_padded = decode is not None
        is_shared = decode is not None and decode.is_shared(batch)
        self._begin_step(batch, is_padded=decode is not None, is_shared=is_shared)
        profile = self._profile
        if decode is not None:
            logits = decode.step(batch, needs, self._fetch, self._call_meanwhile, is_shared=is_shared)
        else:
            inputs = forward.inputs_of(batch)
            with nullcontext() if profile is None else profile.marked():
                on_device = forward.run(inputs)
            self._fetch(num_rows)
            self._call_meanwhile()
            logits = on_device.to("cpu", torch.float32)
        if self._held_rows:
            self._unfinished_rows = num_rows  # the GPU waits for tokens of this step
        else:
            layout.finish(num_rows)
        if profile is not None:
            profile.finish(num_rows)
        self._is_apart = False
        return logits

    @torch.inference_mode()
    def launch_held(self, batch: ForwardBatch) -> bool:
        """Launch the next step behind the one under way, from within `meanwhile`; it goes on when `release` brings its
        tokens, and its results are those of the next `reduced_step`. Whether that can be.

        Until then nothing may wait for the GPU but for results of the step under way, whose copies are launched by
        then where it is padded, and not in others. Its hidden states are gone when the step goes on.
        """
        decode = self._decode
        is_alone = self._broadcast is None and self._send_output is None and self._profile is None
        if decode is None or not self._is_padded or not is_alone:
            return False
        if not decode.launch_held(batch):
            return False
        self._held_rows = len(batch)
        return True

    @torch.inference_mode()
    def release(self, token_ids: torch.Tensor, *, is_wanted: bool = True) -> Exception | None:
        """Let the step that is held go on, with its tokens int64 [T] on the CPU; then finish the one before it. Returns
        the EngineError or ReadError of that one; behind a ReadError the step that was held is still one. Raises what
        looking the tokens up does: the step goes on without any then. is_wanted: whether `reduced_step` will be called
        for it; else it comes to nothing."""
        decode, layout = self._decode, self._pass.layout
        assert decode is not None, "no step is held"
        assert layout is not None, "steps are held on GPUs"
        self._held_rows, unfinished, self._unfinished_rows = 0, self._unfinished_rows, 0
        failed: Exception | None = None
        try:
            layout.check_experts()  # of the step that is over, before the next one may fail
        except (EngineError, ReadError) as error:
            failed = error
        decode.release(token_ids)
        if not is_wanted:
            decode.drop_released()
            layout.wait()
            try:
                layout.check_experts()  # of both steps, lest the next one has their errors
            except (EngineError, ReadError) as error:
                failed = failed or error
            if failed is not None:
                logger.warning("in a step that comes to nothing: %s", failed)
            return None
        if isinstance(failed, EngineError):
            decode.drop_released()
        if failed is None:
            layout.synchronize_usages()
            layout.finished(unfinished)
        return failed

    def drop_released(self) -> None:
        """Forget a step that was released, and for which `reduced_step` will not be called after all."""
        if self._decode is not None:
            self._decode.drop_released()

    @torch.inference_mode()
    def follow(self, batch: ForwardBatch, *, is_padded: bool) -> None:
        """Launch a step of the driver, which has its results.

        is_padded: as it is there; stages find out for themselves.
        """
        if self._send_output is not None:
            self._follow_and_send(self._send_output, batch)
        elif self._pass.layout is None:
            self._pass.on_cpu(batch)
        elif is_padded and self._decode is not None:
            self._decode.launch(batch)
        else:
            self._pass.run(self._pass.inputs_of(batch))

    @torch.inference_mode()
    def follow_shared(self, step: SharedStep) -> None:
        """Run a step of the driver that came through shared memory, see DecodeSteps.follow."""
        assert self._decode is not None, "all processes of a model capture the same steps"
        self._decode.follow(step)

    def _follow_and_send(self, send_output: Callable[[int], None], batch: ForwardBatch) -> None:
        """As a step of one process, but that hidden states go to the next stage, and no logits anywhere."""
        layout, rows = self._pass.layout, len(batch)
        if layout is None:
            self._pass.on_cpu(batch)
            send_output(rows)
            return
        if self._decode is not None and self._decode.takes(batch):
            self._decode.launch(batch)
        else:
            self._pass.run(self._pass.inputs_of(batch))
        self._fetch(rows)
        self._call_meanwhile()
        has_host_work = layout.has_host_work
        if has_host_work:
            layout.wait()
        send_output(rows)
        if has_host_work:
            layout.finish(rows)

    def begin(self, batch: ForwardBatch) -> None:
        """Send the other processes a step that comes to `reduced_step` behind those that were sent before."""
        assert self._broadcast is not None
        self._broadcast(batch, False)
        self._num_begun += 1

    def recovered(self) -> None:
        """Note that all processes are there again, and none has a step under way."""
        self._is_apart, self._num_begun = False, 0

    def _begin_step(self, batch: ForwardBatch, *, is_padded: bool, is_shared: bool = False) -> None:
        """Tell the other processes, unless the step comes to them through shared memory. Raises EngineError when a step
        has failed here that they went on with."""
        if self._broadcast is None:
            return
        if self._num_begun:
            self._num_begun -= 1
            self._is_apart = True
            return
        if self._is_apart:
            raise EngineError("a step has failed in one of several processes; the engine has to be started anew")
        self._is_apart = True
        if not is_shared:
            self._broadcast(batch, is_padded)

    def _fetch(self, num_rows: int) -> None:
        """Let what a step that was launched leaves on GPUs come with its results."""
        assert self._pass.layout is not None
        rows = None if self._profile is None else self._profile.rows_of(num_rows)
        for device in self._pass.layout.devices:
            for usage in device.usages:
                usage.fetch(num_rows, rows)
        if self._profile is not None:
            self._profile.fetch()
        for follower in self._pass.layout.followers:
            follower.launched()

    def _call_meanwhile(self) -> None:
        meanwhile = self._take_meanwhile()
        if meanwhile is not None:
            meanwhile()

    def _take_meanwhile(self) -> Callable[[], None] | None:
        meanwhile, self.meanwhile = self.meanwhile, None
        return meanwhile

    @torch.inference_mode()
    def profile_gpus(self, on: bool) -> GpuProfile | None:
        """Time the parts of steps on GPUs from now on, or no more. The profile to ask after each step; None without a
        GPU. Where steps are replayed they are captured once more, which takes seconds."""
        layout = self._pass.layout
        if on and layout is not None and self._broadcast is not None:
            logger.warning("parts of steps on GPUs are not timed: the model is cut over several")
            return None
        if self._profile is not None:
            self._profile.close()
        self._profile = GpuProfile(layout.devices) if on and layout is not None else None
        if self._decode is not None:
            self._decode.time_steps(self._profile)
        return self._profile
