"""Serves one model: loads it, resumes what its journal has, and answers until a signal comes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from typing_extensions import override

from ktransformers.core import Progress
from ktransformers.errors import KTransformersError, UnsupportedError
from ktransformers.server.answers.replay import resume_requests
from ktransformers.server.app import create_app
from ktransformers.server.backend.base import BackendInterfaceBase
from ktransformers.server.config import ServerConfig
from ktransformers.server.journal.journal import Journal
from ktransformers.server.lifecycle import ServerLife, open_traces
from ktransformers.server.service import Service
from ktransformers.server.telemetry.activity import LoadSummary, watch_loading
from ktransformers.server.telemetry.traces import TraceSink
from ktransformers.tokenizer import Tokenizer
from ktransformers.tokenizer.tools import AUTO, tool_format_named

__all__ = ["OneModel", "serve"]

logger = logging.getLogger("ktransformers.server")

LoadingBar = Callable[[], AbstractContextManager[Progress | None]]


def _journal(folder: Path | None, backend: BackendInterfaceBase) -> Journal | None:
    """Raises ConfigError before the model loads when another server has the folder, say."""
    if folder is not None and not backend.can_go_on:
        raise UnsupportedError(
            f"--state_dir needs --backend_type balance_serve or ktransformers: the {backend.name} backend cannot go on "
            "with an answer that another process has begun"
        )
    return None if folder is None else Journal(folder)


class OneModel(ServerLife):
    """The life of a server of one model. loading_bar: shows how far loading is; None in it: lines of the log do."""

    def __init__(
        self,
        backend: BackendInterfaceBase,
        config: ServerConfig,
        loading_bar: LoadingBar,
        traces: TraceSink | None = None,
    ):
        app = create_app(backend, config, traces)
        self._service: Service = app.state.service
        journal = _journal(config.state_dir, backend)
        super().__init__(app, config, [self._service], traces, journal)
        self._backend, self._loading_bar = backend, loading_bar
        self._service.ongoing.journal, self._service.ongoing.is_restoring = journal, journal is not None

    @override
    async def start(self) -> None:
        with self._loading_bar() as progress:
            await self._backend.start(watch_loading(self.config.model_names[0], progress))
        self._backend.model.tokenizer.use_tool_format(self.config.tool_format)
        await asyncio.to_thread(lambda: self._service.json_limits)  # looks at the whole vocabulary
        if self._journal is not None:
            await resume_requests(self.app, self._service, self._journal)
        model = self._service.model
        logger.info("%s, %d tokens of context, backend %s", model.description, model.max_len, self._backend.name)
        if not model.tokenizer.has_vocabulary:
            logger.warning("the model's files hold no vocabulary: only requests with token ids can be answered")
        logger.info("tool calls: %s", _tool_format(model.tokenizer, self.config.tool_format))

    @override
    async def log_load(self) -> None:
        await LoadSummary(self._backend, self._service.metrics.counts).run()

    @override
    async def lost(self) -> KTransformersError:
        return await self._backend.lost()

    @override
    async def stop(self) -> None:
        await self._backend.close()
        self._service.workers.close()


def _tool_format(tokenizer: Tokenizer, asked: str) -> str:
    """How tool calls are read, and who says so."""
    if tokenizer.tool_format is None:
        return "none, because there is no chat template" if asked == AUTO else "none (--tool_format)"
    if asked != AUTO:
        return f"{tokenizer.tool_format} (--tool_format)"
    if tokenizer.has_chat_template and not tokenizer.turns.shows_tools:
        return f"{tokenizer.tool_format}; the chat template writes no tools, so they are described in a system turn"
    return f"{tokenizer.tool_format}, as the model's files tell (--tool_format NAME overrides)"


def serve(backend: Callable[[], BackendInterfaceBase], config: ServerConfig, loading_bar: LoadingBar) -> Any:
    """Serve until a signal comes. backend: makes the backend, within the event loop that it will live in.

    Raises KTransformersError when the port, the certificate, a flag or the model cannot be used.
    """
    if config.tool_format != AUTO:
        tool_format_named(config.tool_format)

    traces = open_traces(config.otlp_traces_endpoint)

    async def main() -> None:
        await OneModel(backend(), config, loading_bar, traces).serve()

    asyncio.run(main())
