"""Chooses the type in which each layer keeps its keys and values: what --kv_type asks for, where the layer's attention
reads it.

And which layers multiply what they keep as it is, which --attention_products kv asks for.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from ktransformers.cache.paged import LayerShape
from ktransformers.config import ATTENTION_PRODUCTS
from ktransformers.errors import ConfigError
from ktransformers.kernels import cpu
from ktransformers.kernels.triton.attention.kv_codes import why_no_quantized_attention
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.attention.gqa import KAttention
from ktransformers.operators.attention.mla import KMLAAttention

__all__ = ["GPU_DTYPES", "KV_DTYPES", "KvTypes"]

logger = logging.getLogger(__name__)

KV_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
"""By the names of --kv_type; "auto" is the type of the rows."""

GPU_DTYPES = frozenset({torch.int8, torch.float8_e4m3fn})
"""What attention on a GPU reads besides the type of its rows."""


@dataclass(frozen=True, slots=True)
class KvTypes:
    """The type that is asked for, and which layers keep the type of their rows whatever that is, by index, and why.

    products: --attention_products.
    """

    kv_type: str
    own: Mapping[int, str]
    products: str = ATTENTION_PRODUCTS[0]

    @classmethod
    def of(
        cls,
        kv_type: str,
        model: nn.Module,
        operators: Mapping[str, nn.Module],
        products: str = ATTENTION_PRODUCTS[0],
    ) -> KvTypes:
        """Find the layers of `model` that keep the type of their rows. operators: the planned ones by key. Attention
        that is not ours may write to the cache itself, rows as they are."""
        own: dict[int, str] = {}
        for key, module in model.named_modules():
            layer_idx, operator = getattr(module, "layer_idx", None), operators.get(key)
            if not isinstance(layer_idx, int) or not hasattr(module, "scaling"):
                continue
            if isinstance(operator, KCompressedAttention):
                own[layer_idx] = "compressed attention, whose entries are made of what is kept"
            elif operator is not None and not isinstance(operator, KAttention | KMLAAttention):
                own[layer_idx] = f"{type(operator).__name__} attends"
        return cls(kv_type, own, products)

    def _why_not(self, index: int, shape: LayerShape) -> str | None:
        """Why a layer keeps the type of its rows though another is asked for."""
        wanted = KV_DTYPES[self.kv_type]
        if wanted is shape.row_dtype:
            return None
        if index in self.own:
            return self.own[index]
        if shape.place != "cpu" and wanted not in GPU_DTYPES:
            return "on a GPU"
        if shape.place != "cpu" and not shape.is_latent and _is_wide(shape.value_dim):
            return f"values of {shape.value_dim} columns, whose codes a GPU's kernel gets wrong"
        return None

    def applied(self, shapes: Sequence[LayerShape]) -> list[LayerShape]:
        """The shapes with the types that their layers keep."""
        if self.kv_type == "auto":
            return list(shapes)
        return [self._applied(i, shape) for i, shape in enumerate(shapes)]

    def _applied(self, index: int, shape: LayerShape) -> LayerShape:
        if not shape.has_pages or self._why_not(index, shape) is not None:
            return shape
        kept = replace(shape, dtype=KV_DTYPES[self.kv_type])
        return replace(kept, kept_products=self.products == "kv" and _why_not_kept(kept) is None)

    def report(self, shapes: Sequence[LayerShape]) -> None:
        """Log one line for what is asked for and not done. Raises ConfigError for products of codes without a GPU."""
        if self.kv_type == "auto":
            return
        paged = [i for i, shape in enumerate(shapes) if shape.has_pages]
        if not paged:
            logger.warning("--kv_type %s has no effect: the model keeps no keys and values", self.kv_type)
        found: dict[tuple[str, torch.dtype], list[int]] = {}
        for i in paged:
            reason = self._why_not(i, shapes[i])
            if reason is not None:
                found.setdefault((reason, shapes[i].row_dtype), []).append(i)
        for (reason, dtype), layers in found.items():
            which = "all layers keep" if len(layers) == len(paged) else f"layers {_ranges(layers)} keep"
            kept = str(dtype).removeprefix("torch.")
            logger.warning("--kv_type %s: %s keys and values in %s (%s)", self.kv_type, which, kept, reason)
        if self.products == "kv":
            self._report_products({i: shapes[i] for i in paged})

    def _report_products(self, shapes: Mapping[int, LayerShape]) -> None:
        """shapes: of the layers that keep keys and values, by index."""
        if self.kv_type != "bf16" and all(shape.place == "cpu" for shape in shapes.values()):
            raise ConfigError(
                f"--attention_products kv, of --kv_type {self.kv_type}: no attention of this model runs on a GPU here; "
                "leave the option out, or on the CPU give --kv_type bf16"
            )
        found: dict[str, list[int]] = {}
        for i, shape in shapes.items():
            reason = _why_not_kept(shape)
            if reason is not None:
                found.setdefault(reason, []).append(i)
        instead = "multiply as without it" if self.kv_type == "bf16" else "multiply numbers, not codes"
        for reason, layers in found.items():
            which = "all layers" if len(layers) == len(shapes) else f"layers {_ranges(layers)}"
            logger.warning("--attention_products kv: %s %s (%s)", which, instead, reason)


def _is_wide(columns: int) -> bool:
    """Whether a head takes two parts (launch.py) of 128 columns or more: with 160, on an H200 with Triton
    3.6, results from codes were wrong, with up to 128 and with 256 right."""
    return columns > 128 and columns & (columns - 1) != 0


def _why_not_kept(shape: LayerShape) -> str | None:
    """Why a layer does not multiply what it keeps as it is; None where it does."""
    if shape.place == "cpu" and shape.is_scaled:
        return "on the CPU"
    if shape.is_latent:
        return "latent attention"
    if shape.place != "cpu":
        if shape.dtype is torch.bfloat16:
            return "a GPU's products are of bf16"
        return why_no_quantized_attention(shape.dtype, shape.device, (shape.key_dim, shape.value_dim))
    if shape.dtype is not torch.bfloat16:
        return f"what is kept is {str(shape.dtype).removeprefix('torch.')}"
    if shape.key_dim > cpu.MAX_BF16_DIMS:
        return f"keys of more than {cpu.MAX_BF16_DIMS} dimensions"
    return None


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
