"""The error of a step whose results are no numbers."""

from __future__ import annotations

from ktransformers.errors import KTransformersError

__all__ = ["NotFiniteError"]


class NotFiniteError(KTransformersError):
    """The model computed NaN or infinity. value: the number found. what: whose number it is, with its article."""

    def __init__(self, value: float, what: str, damage: str = ""):
        """Make the error's message. damage: what a DamageScan says of the weights, to be put behind."""
        self.value, self.what = value, what
        super().__init__(
            f"the model computed {value} as {what}: its weights are damaged, or they do not fit its config{damage}"
        )

    def with_damage(self, damage: str) -> NotFiniteError:
        """Return this error with the finding of a DamageScan of the weights behind it."""
        return NotFiniteError(self.value, self.what, damage)
