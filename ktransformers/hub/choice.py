"""Chooses a quantization when nobody names one: the best that fits. Knows what fits only from its caller."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ktransformers.core import format_bytes
from ktransformers.hub.variants import Variant

__all__ = ["VariantChoice", "candidates", "choose"]


@dataclass(frozen=True, slots=True)
class VariantChoice:
    """The choice of a variant. variant: None when none fits. refused: (variant, why it does not fit) of better ones."""

    variant: Variant | None
    refused: tuple[tuple[Variant, str], ...]


def candidates(variants: Sequence[Variant], nbytes: Mapping[str, int]) -> list[Variant]:
    """Return the variants to choose from, the best first. nbytes: of each label.

    Of one model, more bytes are the better quantization. Files of 16 and 32 bits are left out where there are quantized
    ones: Q8_0 cannot be told from them at half the bytes, and bytes are time. Safetensors count where there is no GGUF.
    """
    quantized = [variant for variant in variants if variant.is_quantized]
    gguf = [variant for variant in variants if variant.is_gguf]
    return sorted(quantized or gguf or variants, key=lambda variant: -nbytes[variant.label])


def choose(
    variants: Sequence[Variant], nbytes: Mapping[str, int], memory: int, misfit: Callable[[Variant], str | None]
) -> VariantChoice:
    """Choose the first of `variants` that fits.

    memory: bytes free on all devices, which spares asking about larger files.
    misfit: why a variant does not fit, None when it does.
    """
    refused: list[tuple[Variant, str]] = []
    for variant in variants:
        size = nbytes[variant.label]
        reason = f"{format_bytes(size)} of weights, {format_bytes(memory)} free" if size > memory else misfit(variant)
        if reason is None:
            return VariantChoice(variant, tuple(refused))
        refused.append((variant, reason))
    return VariantChoice(None, tuple(refused))
