"""Checked access to the fields of a Hugging Face config: counts, lists by layer, names. What is absurd is refused.

Knows how values are written; not what any of them means.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ktransformers.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["MAX_NUMBER", "ConfigFields", "absurd", "token_ids"]

MAX_NUMBER = (1 << 31) - 1


class ConfigFields:
    """Checked access to one config. `of` may be any class: configs come with their model's own code, too.

    Some configs of transformers have configs of their own for single layers (`is_heterogeneous`): a field in which
    those differ reads as a list with one value for each layer.
    """

    def __init__(self, of: PretrainedConfig):
        self.of = of

    def raw(self, name: str) -> object:
        """Return the value of a field as it is; None without."""
        try:
            return getattr(self.of, name, None)
        except RuntimeError:  # what transformers raises for a field that has no value of all layers
            return [getattr(layer, name, None) for layer in self.of.per_layer_config]

    def part(self, name: str) -> ConfigFields:
        """Return the config of a part of the model; this one where it has none of its own."""
        part = self.raw(name)
        return ConfigFields(part) if hasattr(part, "to_dict") else self

    def first(self, names: Sequence[str]) -> str | None:
        """Return the first of these fields that has a value."""
        return next((name for name in names if self.raw(name) is not None), None)

    def number(self, name: str, most: int = MAX_NUMBER) -> int:
        """Return a count of at least 1 that every model has."""
        value = self.find(name, most=most)
        if value is None:
            raise ConfigError(f"the model's config says no {name}")
        if value == 0:
            raise absurd(name, 0)
        return value

    def find(self, *names: str, most: int = MAX_NUMBER) -> int | None:
        """Return the count in the first of these fields that has a value."""
        name = self.first(names)
        return None if name is None else _count(name, self.raw(name), most)

    def numbers(self, num_layers: int, *names: str, most: int = MAX_NUMBER) -> tuple[int, ...] | None:
        """Return counts by layer, from a field with one number for all or a list with one for each; none of a layer is
        0.
        """
        name = self.first(names)
        if name is None:
            return None
        value = self.raw(name)
        if not isinstance(value, list | tuple):
            return (_count(name, value, most),) * num_layers
        return tuple(_count(name, one or 0, most) for one in self._of_layers(name, value, num_layers))

    def words(self, num_layers: int, *names: str) -> tuple[str, ...] | None:
        """Return names by layer, from a field with a list of names."""
        name = self.first(names)
        value = None if name is None else self.raw(name)
        if name is None or not value:
            return None
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"the model's config says {name} {value!r:.60}; a list of names is needed")
        return tuple(str(one) for one in self._of_layers(name, value, num_layers))

    def _of_layers(self, name: str, value: Sequence[object], num_layers: int) -> Sequence[object]:
        if len(value) < num_layers:
            raise ConfigError(f"the model's config has {name} for {len(value)} layers, and {num_layers} layers")
        return value[:num_layers]


def absurd(name: str, value: object) -> ConfigError:
    """Return the error to raise for a value that no model has."""
    return ConfigError(f"the model's config says {name} {value!r:.60}, which no model has")


def _count(name: str, value: object, most: int) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"the model's config says {name} {value!r:.60}; a number is needed")
    if not 0 <= value <= most:
        raise absurd(name, value)
    return value


def token_ids(value: object) -> tuple[int, ...]:
    """Return the ids in what a config says as eos_token_id: none, one or a list. Raises ConfigError."""
    several = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in several):
        raise ConfigError(f"the model's config says eos_token_id {value!r:.60}; a token's number is needed, or a list")
    return tuple(several)
