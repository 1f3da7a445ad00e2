"""Chooses which kernels attend on GPUs: Triton's, or FlashInfer's in prefill steps where it is installed and can.

Latent attention has a third way in prefill steps, on expanded keys (operators/attention/latent_materialization.py),
which is taken sequence by sequence where it is faster than what is chosen here.

What can be known is asked while planning; once the model is loaded, FlashInfer computes something of every shape and
is used for those on which it agrees with the Triton kernels. Knows plans and operators, not steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from ktransformers.config import KV_TYPES
from ktransformers.engine.plan.kv_types import GPU_DTYPES, KV_DTYPES
from ktransformers.errors import ConfigError
from ktransformers.kernels import flashinfer
from ktransformers.kernels.flashinfer import FlashInfer, Shape
from ktransformers.operators.attention.flash import FlashLayer, FlashSteps
from ktransformers.operators.attention.gqa import KAttention
from ktransformers.operators.attention.latent_materialization import MaterializationPolicy
from ktransformers.operators.attention.mla import KMLAAttention
from ktransformers.operators.base import Operator
from ktransformers.operators.device import Device, use
from ktransformers.optimize.plan import Plan

__all__ = ["AttentionChoice", "choose_attention", "find_flash", "materialization_nbytes"]

logger = logging.getLogger(__name__)

_SAID_LEN = 8192  # positions for which the log says from how many rows on keys are expanded


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The operators that are to use FlashInfer. flash: their names, with their shapes. reason: why the others do
    not."""

    flash: Mapping[str, Shape]
    reason: str | None

    def nbytes(self, plan: Plan) -> dict[str, int]:
        """Bytes that FlashInfer takes of each device."""
        shapes = {(plan.operators[key].device.name, shape) for key, shape in self.flash.items()}
        counts = Counter(device for device, _ in shapes)
        return {device: flashinfer.workspace_nbytes(count) for device, count in counts.items()}


def _asked(operators: Iterable[tuple[str, Operator]]) -> list[tuple[str, KAttention | KMLAAttention]]:
    """Attention on GPUs."""
    return [(k, op) for k, op in operators if isinstance(op, KAttention | KMLAAttention) and op.device.is_gpu]


def _why_not(operator: KAttention | KMLAAttention, kv_type: str) -> str | None:
    if KV_DTYPES.get(kv_type) in GPU_DTYPES:
        return f"it does not read the scales of --kv_type {kv_type}"
    reason = flashinfer.why_not(operator.device.torch_device)
    if reason is not None:
        return reason
    if isinstance(operator, KMLAAttention) and operator.absorb_for_prefill is False:
        return "its rule says absorb_for_prefill: false, and FlashInfer attends absorbed"
    shape = operator.attention_shape()
    if shape is None:
        return "it is no plain grouped-query attention (it has sinks, gates or norms of its own)"
    return flashinfer.why_not_shape(shape)


def choose_attention(plan: Plan, backend: str, kv_type: str = KV_TYPES[0]) -> AttentionChoice:
    """Choose what is to use FlashInfer, as far as can be known before it runs. backend, kv_type: of EngineConfig.

    Raises ConfigError when `backend` names kernels that some layer, or this machine, cannot use.
    """
    asked = _asked(plan.operators.items())
    if not asked and backend != "auto":
        raise ConfigError(
            f"--attention_backend {backend}: no attention of this model runs on a GPU here; leave the option out"
        )
    if backend == "triton":
        return AttentionChoice({}, "--attention_backend triton")
    flash: dict[str, Shape] = {}
    reasons: dict[str, str] = {}  # the first layer with each reason
    for key, operator in asked:
        reason, shape = _why_not(operator, kv_type), operator.attention_shape()
        if reason is None and shape is not None:
            flash[key] = shape
        else:
            reasons.setdefault(reason or "", key)
    if reasons and backend == "flashinfer":
        raise _refusal("; ".join(f"{key}: {reason}" for reason, key in reasons.items()))
    return AttentionChoice(flash, "; ".join(reasons) or None)


def materialization_nbytes(plan: Plan, backend: str) -> dict[str, int]:
    """Bytes of each device that latent attention expands keys into. backend: of EngineConfig."""
    if backend == "flashinfer":
        return {}
    found = (op for op in plan.operators.values() if isinstance(op, KMLAAttention))
    choices = {op.device.name: choice for op in found if (choice := op.materialization_choice()) is not None}
    return {name: choice.nbytes for name, choice in choices.items()}


def _refusal(reason: str) -> ConfigError:
    return ConfigError(
        f"--attention_backend flashinfer: {reason}. Install it with `pip install 'ktransformers-engine[flashinfer]'` if"
        " it is missing; pass --attention_backend auto to use it where it can be, or triton to do without"
    )


def find_flash(plan: Plan, backend: str, page_size: int, kv_type: str = KV_TYPES[0]) -> dict[str, FlashLayer]:
    """Make FlashInfer for the operators of a loaded model that are to use it and on which it proves right; said once.

    page_size, kv_type: of the cache. Raises ConfigError when `backend` is "flashinfer" and it fails.
    """
    asked = _asked(plan.operators.items())
    if not asked:
        return {}
    choice = choose_attention(plan, backend, kv_type)
    if choice.flash:
        logger.info("trying FlashInfer, which may have to compile kernels first")
    started: dict[str, FlashSteps | str] = {}
    tried: dict[tuple[str, Shape], str | None] = {}
    failures: list[str] = []
    found: dict[str, FlashLayer] = {}
    for key, shape in choice.flash.items():
        device = plan.operators[key].device
        if device.name not in started:
            started[device.name] = _start(device)
        steps = started[device.name]
        if isinstance(steps, str):
            failures.append(steps)
            continue
        if (device.name, shape) not in tried:
            tried[device.name, shape] = _try(steps.kernels, shape, page_size)
        failure = tried[device.name, shape]
        if failure is None:
            found[key] = FlashLayer(shape, steps, is_required=backend == "flashinfer")
        else:
            failures.append(failure)
    if failures and backend == "flashinfer":
        raise _refusal(failures[0])
    reasons = [*dict.fromkeys(failures), *([choice.reason] if choice.reason else [])]
    _say(len(found), len(asked), reasons)
    _log_materialization(
        [op.materialization_choice(found.get(key)) for key, op in asked if isinstance(op, KMLAAttention)]
    )
    return found


def _start(device: Device) -> FlashSteps | str:
    try:
        return FlashSteps(FlashInfer(device.torch_device))
    except Exception as error:  # noqa: BLE001 - it may be any version, and fail in any way
        return f"it does not start ({_words(error)})"


@torch.inference_mode()
def _try(kernels: FlashInfer, shape: Shape, page_size: int) -> str | None:
    """Why FlashInfer does not do for `shape`, found by computing; None when it does."""
    use(kernels.device)
    try:
        error = flashinfer.difference(kernels, shape, page_size)
    except Exception as failure:  # noqa: BLE001 - it compiles kernels, with whatever compiler there is
        return f"it failed when tried ({_words(failure)})"
    allowed = flashinfer.tolerance(shape)
    if error <= allowed:
        return None
    return f"its result differs from Triton's by {error:.2g}, more than {allowed:.2g}, for {shape}"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _say(num_layers: int, num_asked: int, reasons: list[str]) -> None:
    why = "; ".join(reasons)
    if not num_layers:
        logger.info("attention on GPUs: Triton (FlashInfer is not used: %s)", why)
        return
    name = f"FlashInfer {flashinfer.version()} in prefill steps, Triton in decode steps"
    if num_layers == num_asked:
        logger.info("attention on GPUs: %s", name)
    else:
        logger.info(
            "attention on GPUs: %s for %d of %d layers; Triton for the others (%s)", name, num_layers, num_asked, why
        )


def _log_materialization(choices: list[MaterializationPolicy | None]) -> None:
    for choice in set(choices):
        least = None if choice is None else choice.least_rows(_SAID_LEN)
        if least is None:
            continue
        logger.info(
            "latent attention: from %d rows on (at %d positions), the rows of a sequence in a prefill step attend on "
            "expanded keys (Triton)",
            least,
            _SAID_LEN,
        )
