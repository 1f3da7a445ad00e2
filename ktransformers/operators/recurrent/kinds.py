"""Operator name shared by all recurrent layers, so that one rule places them: which operator it is follows from the
module.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import override

from ktransformers.errors import UnsupportedError
from ktransformers.operators.recurrent.base import RecurrentOperator
from ktransformers.operators.recurrent.convolved import KConvolvedProjection
from ktransformers.operators.recurrent.delta import KGatedDeltaNet, KGatedDeltaParts, KKimiDeltaAttention
from ktransformers.operators.recurrent.gated_linear import KGatedLinearUnit
from ktransformers.operators.recurrent.mamba import KMamba, KMamba2, KMambaHeads
from ktransformers.operators.recurrent.short import KLightningAttention, KShortConv
from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KRecurrent"]

_KINDS: tuple[type[RecurrentOperator], ...] = (
    KGatedDeltaNet,
    KGatedDeltaParts,
    KKimiDeltaAttention,
    KMamba2,
    KMamba,
    KMambaHeads,
    KShortConv,
    KLightningAttention,
    KConvolvedProjection,
    KGatedLinearUnit,
)


class KRecurrent(WrapperOperator):
    """The operator of whatever recurrent module it is given: calling this class makes one of the others."""

    def __new__(cls, module: nn.Module, key: str, *args: Any, **kwargs: Any) -> Any:
        """Raises UnsupportedError for modules of no kind that is known, and what the kinds raise."""
        kind = next((kind for kind in _KINDS if kind.is_for(module)), None)
        if kind is None:
            raise UnsupportedError(f"KRecurrent cannot replace {key}: {type(module).__name__} is no kind that it knows")
        return kind(module, key, *args, **kwargs)

    @classmethod
    @override
    def is_for(cls, module: nn.Module) -> bool:
        return any(kind.is_for(module) for kind in _KINDS)
