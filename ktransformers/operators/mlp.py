"""Dense feed-forward block: down(act(gate(x)) * up(x)). Its three linears are operators of their own."""

from __future__ import annotations

from ktransformers.operators.wrapper import WrapperOperator

__all__ = ["KMLP"]


class KMLP(WrapperOperator):
    """A dense MLP of any family: fp32 [..., H] in and out."""
