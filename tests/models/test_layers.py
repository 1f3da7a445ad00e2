"""What modules of `transformers` are asked about their place and their names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from ktransformers.models.layers import named_cache


def renamed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers wraps a forward whose keyword has another name now."""

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapped


class Before(nn.Module):
    def forward(self, x: object, past_key_values: object = None, **kwargs: object) -> None: ...


class Since(nn.Module):
    @renamed
    def forward(self, x: object, cache: object = None, **kwargs: object) -> None: ...


class Neither(nn.Module):
    def forward(self, x: object, **kwargs: object) -> None: ...


@pytest.mark.parametrize(
    ("module", "name"), [(Before(), "past_key_values"), (Since(), "cache"), (Neither(), "past_key_values")]
)
def test_a_cache_has_the_name_that_a_module_has_for_it(module: nn.Module, name: str) -> None:
    kept = object()
    assert named_cache(module, kept) == {name: kept}


def test_an_operator_around_a_module_takes_the_modules_cache() -> None:
    class Around(nn.Module):
        def __init__(self, inner: nn.Module):
            super().__init__()
            self.inner = inner

        def forward(self, *args: object, **kwargs: object) -> object:
            return self.inner(*args, **kwargs)

    class Takes(nn.Module):
        def forward(self, x: object, cache: object = None) -> object:
            return cache

    assert named_cache(Around(Around(Takes())), 3) == {"cache": 3}
    assert named_cache(Around(nn.Identity()), 3) == {"past_key_values": 3}
