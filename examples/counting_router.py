"""An operator of one's own: a router that counts which experts it chooses. Used by own_operator.py."""

from collections import Counter
from typing import Any, ClassVar

import torch

from ktransformers.core import Phase
from ktransformers.operators.wrapper import WrapperOperator


class CountingRouter(WrapperOperator):
    """Runs the family's own router and looks at its result.

    A WrapperOperator keeps the forward of the module that it replaces, and loads its weights. For computing something
    else, subclass `ktransformers.operators.base.Operator`: docs/structure.md, "Adding an operator", has the steps.
    """

    OPS: ClassVar[dict[str, str]] = {"CountingRouter": "the family's own router, with a count of what it chose"}
    chosen: ClassVar[Counter[tuple[str, int]]] = Counter()  # (the router's name, expert) -> tokens

    def op(self, phase: Phase) -> str:
        """The name that `ktransformers plan` shows for it."""
        return "CountingRouter"

    def forward(self, hidden_states: torch.Tensor) -> Any:
        """hidden_states [T, H] -> (router_logits [T, E], topk_weights [T, K], topk_ids [T, K])."""
        routed = self.inner(hidden_states)
        self.chosen.update((self.key, expert) for expert in routed[2].flatten().tolist())
        return routed
