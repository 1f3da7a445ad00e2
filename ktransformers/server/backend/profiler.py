"""Turns profiles of a running service on and off, one at a time. Knows no HTTP, and of a backend two calls.

off ── start: the bridge runs, then the backend is told ──> on
 ^                                                           │ stop: the backend is told, then the bridge ends
 └───────────────────────────────────────────────────────────┴ the bridge dies: the backend is told; serving goes on
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ktransformers.errors import ConfigError, ConflictError
from ktransformers.profiling.capture import Capture, ProfileLimits, shown_command
from ktransformers.profiling.files import check_folder
from ktransformers.profiling.messages import ProfileMeta

__all__ = ["ProfileConfig", "Profiler"]

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 2.0
"""How long the end of the service waits for an engine to end its step and to say farewell."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class ProfileConfig:
    """Folders and limits of profiles. folder: of the profile that begins with the service, if one does. root: below
    which requests may begin others.
    """

    folder: Path | None = None
    root: Path | None = None
    limits: ProfileLimits = field(default_factory=ProfileLimits)
    log_level: str = "info"

    def check(self) -> None:
        """Raise ConfigError for folders that cannot be written to: minutes before the model has loaded."""
        if self.folder is not None:
            check_folder(self.folder)
        if self.root is not None and not self.root.is_dir():
            raise ConfigError(f"--profile_root {self.root} is not a folder; make it, or name another")


@dataclass(slots=True)
class Profiler:
    """Turns profiles of one backend on and off. turn: makes the backend record for the endpoint, or no more (None).
    meta: what there is to say of the model.

    All methods are called on one event loop.
    """

    config: ProfileConfig
    turn: Callable[[str | None], Awaitable[None]]
    meta: Callable[[], ProfileMeta]
    _capture: Capture | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _timer: asyncio.TimerHandle | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _last: dict[str, Any] | None = None

    async def begin(self) -> None:
        """Start the profile that begins with the service, if one is wanted. Raises ConfigError or EngineError."""
        if self.config.folder is not None:
            async with self._lock:
                await self._start(self.config.folder)

    async def start(self, name: str | None, max_seconds: float | None) -> dict[str, Any]:
        """Start a profile in this folder below the root; without a name it is called by the time.

        Returns its status. Raises ConfigError for names that are none or taken, ConflictError when one is on.
        """
        root = self.config.root
        if root is None:
            raise ConfigError("profiles cannot be started here: the server was started without --profile_root")
        if name is not None and _NAME.fullmatch(name) is None:
            raise ConfigError("dir must be a name of at most 64 letters, digits and ._-, which begins with none of ._-")
        folder = root / (name or time.strftime("profile-%Y%m%d-%H%M%S"))
        async with self._lock:
            if self._capture is not None:
                raise ConflictError("a profile is being written already; POST /v1/profile/stop ends it")
            await self._start(folder)
            if max_seconds is not None:
                self._timer = asyncio.get_running_loop().call_later(max_seconds, self._spawn, self._capture)
        return self.status()

    async def _start(self, folder: Path) -> None:
        loop, config = asyncio.get_running_loop(), self.config
        meta = msgspec.structs.replace(self.meta(), command=shown_command(sys.argv))

        def died() -> None:
            loop.call_soon_threadsafe(self._spawn, capture)

        capture = await asyncio.to_thread(Capture, folder, meta, config.limits, died, config.log_level)
        self._capture = capture
        await self.turn(capture.endpoint)

    def _spawn(self, capture: Capture | None) -> None:
        """End this profile, if it is still the one."""
        task = asyncio.create_task(self._end_if(capture))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _end_if(self, capture: Capture | None) -> None:
        async with self._lock:
            if capture is not None and capture is self._capture:
                await self._stop(capture)

    async def stop(self) -> dict[str, Any]:
        """End the profile that is being written, and wait until its files are complete. Raises ConflictError when none
        is.
        """
        async with self._lock:
            if self._capture is None:
                raise ConflictError("no profile is being written")
            await self._stop(self._capture)
        return self.status()

    async def _stop(self, capture: Capture) -> None:
        self._forget_timer()
        await self.turn(None)
        await asyncio.to_thread(capture.stop)
        self._last, self._capture = capture.status(), None

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def status(self) -> dict[str, Any]:
        """Return whether a profile is being written, and its figures, or those of the last one."""
        if self._capture is not None:
            return {"state": "on", **self._capture.status()}
        return {"state": "off", "last": self._last}

    async def close(self, end_backend: Callable[[], Awaitable[None]]) -> None:
        """End the profile that is being written, with the service. end_backend: what ends all that records, after it
        was stopped.
        """
        self._forget_timer()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        capture, self._capture = self._capture, None
        if capture is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.turn(None), CLOSE_SECONDS)
            await asyncio.to_thread(capture.end, CLOSE_SECONDS)
        await end_backend()
        if capture is not None:
            await asyncio.to_thread(capture.stop)
