"""The processes beside the driver as it speaks with them: children of its own, or on other machines."""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import threading
from collections.abc import Callable
from typing import BinaryIO, Protocol

from typing_extensions import override

from ktransformers.engine.parallel.ranks.agent import connect
from ktransformers.engine.parallel.ranks.messages import Captured, Failed, Loaded, decode
from ktransformers.errors import EngineError, reason_of
from ktransformers.system.child import read_frame, reported_error, spawn_code
from ktransformers.system.process_group import ProcessGroup, Program

__all__ = ["LocalWorker", "RemoteWorker", "WorkerHandle"]

logger = logging.getLogger(__name__)

OnDeath = Callable[[str], None]
"""Called with a message, on a thread, when a process ends by itself."""


class WorkerHandle(Protocol):
    """A process beside the driver. name: for people. address: of this machine as it knows it; None: the same."""

    name: str
    address: str | None

    def send(self, data: bytes) -> None:
        """Send a frame to the process. Raises EngineError when it is gone."""
        ...

    def receive(self) -> Loaded | Captured:
        """Receive the process's next message. Raises what it failed with, EngineError when it is gone."""
        ...

    def watch(self) -> None:
        """Report the end of the process from now on, see OnDeath."""
        ...

    def close(self) -> None:
        """End the process, or the connection to it."""
        ...


def _answer_of(data: bytes | None, name: str) -> Loaded | Captured:
    if data is None:
        raise EngineError(f"the process of {name} ended while the model was loaded; see its lines above")
    message: Loaded | Captured | Failed = decode(data, Loaded | Captured | Failed)
    if isinstance(message, Failed):
        raise reported_error(message.error, f"{name}: {message.message}")
    return message


class LocalWorker(WorkerHandle):
    """A worker process of this machine, of a group. gpu: CUDA_VISIBLE_DEVICES; "" for what the driver sees."""

    address = None

    def __init__(self, group: ProcessGroup, name: str, gpu: str, on_death: OnDeath):
        self.name, self._group, self._on_death, self._is_closing = name, group, on_death, False
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu} if gpu else None
        command = spawn_code("ktransformers.engine.load.worker")
        self.process = group.start(Program(name, command, stdout=subprocess.PIPE, environment=environment))

    @override
    def send(self, data: bytes) -> None:
        try:
            self.process.send(data)
        except OSError as error:
            raise EngineError(f"the process of {self.name} is gone") from error

    @override
    def receive(self) -> Loaded | Captured:
        """Receive the process's next message. Raises what it failed with."""
        return _answer_of(read_frame(self.process.stdout), self.name)

    @override
    def watch(self) -> None:
        self.process.on_end(self._ended)

    def _ended(self, code: int) -> None:
        if not self._is_closing:
            self._on_death(f"the process of {self.name} has ended with {code}")

    @override
    def close(self) -> None:
        self._is_closing = True
        self._group.stop(self.process)
        self.process.stdout.close()


class RemoteWorker(WorkerHandle):
    """A process that an agent (agent.py) has started. Raises EngineError where there is none."""

    def __init__(self, name: str, host: str, port: int, secret: bytes, on_death: OnDeath):
        self.name = f"{name} at {host}:{port}"
        self._on_death, self._is_closing, self._is_watched = on_death, False, False
        self._connection = connect(host, port, secret)
        self.address = str(self._connection.getsockname()[0])
        self._from: BinaryIO = self._connection.makefile("rb")
        self._received: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._has_ended = False
        threading.Thread(target=self._read, name=self.name, daemon=True).start()

    def _read(self) -> None:
        data: bytes | None = b""
        while data is not None:
            try:
                data = read_frame(self._from)
            except OSError as error:
                logger.debug("%s: %s", self.name, reason_of(error))
                data = None
            self._received.put(data)
        self._from.close()
        with self._lock:
            self._has_ended = True
            if not self._is_watched:
                return
        self._died()

    def _died(self) -> None:
        if not self._is_closing:
            self._on_death(f"the process of {self.name} has ended, or the connection to it")

    @override
    def send(self, data: bytes) -> None:
        try:
            self._connection.sendall(data)
        except OSError as error:
            raise EngineError(f"the process of {self.name} is gone") from error

    @override
    def receive(self) -> Loaded | Captured:
        return _answer_of(self._received.get(), self.name)

    @override
    def watch(self) -> None:
        with self._lock:
            self._is_watched = True
            if not self._has_ended:
                return
        self._died()

    @override
    def close(self) -> None:
        self._is_closing = True
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("%s: %s", self.name, reason_of(error))
        self._connection.close()
