"""The life of a server of several models, without weights."""

from __future__ import annotations

import asyncio
import logging

import pytest

from ktransformers.errors import EngineError, LoadFailedError
from tests.support.models.fake_models import Lab


def test_a_server_whose_first_model_does_not_load_says_so_and_not_that_it_stopped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="ktransformers.server")

    async def work() -> None:
        lab = Lab(first=["a"], port=0)
        lab.lives["a"].error = EngineError("no room")
        with pytest.raises(LoadFailedError):
            await lab.models.serve()
        assert not any(line.startswith("stopped") for line in caplog.messages)

    asyncio.run(work())
