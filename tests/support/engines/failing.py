"""Methods that fail once, in the middle of what a test runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

__all__ = ["fail_once"]


def fail_once(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Let the sixth call of the method `name` of `owner` raise RuntimeError "out of luck", and call `meanwhile`."""
    method, left = getattr(owner, name), iter(range(5))

    def failing(*args: object) -> object:
        if next(left, None) is None:
            monkeypatch.setattr(owner, name, method)
            meanwhile()
            raise RuntimeError("out of luck")
        return method(*args)

    monkeypatch.setattr(owner, name, failing)
