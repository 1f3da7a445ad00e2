"""The bridge process: takes what recorders send, joins it, writes it down.

    options on standard input ──> files made, socket bound ── {"endpoint"} on standard output ──> writing
    end of file on standard input ──> whoever sends says farewell, or falls silent ──> meta.json says when

It outlives its parent by that last step: what it was sent before the end is written. Standard output has a line of JSON
whenever its counts have changed. Imports neither torch nor anything that does.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

from ktransformers.errors import ConfigError
from ktransformers.profiling.files import ProfileFiles
from ktransformers.profiling.join import Joiner
from ktransformers.profiling.messages import (
    SCHEMA,
    SCHEMA_VERSION,
    BridgeOptions,
    DropsRecord,
    Farewell,
    Message,
    decode_messages,
)
from ktransformers.system.child import become, leave_signals, read_frame
from ktransformers.system.logs import set_up_logging
from ktransformers.system.private_folder import PrivateFolder

__all__ = ["Bridge", "main"]

FLUSH_SECONDS = 0.5
"""Between two times that lines reach the files."""

SILENCE_SECONDS = 1.5
"""After the end: a recorder drains fifteen times in it, so whoever has said nothing is gone."""

_QUIET_SECONDS = 0.3
"""After the end and all farewells: what is on its way comes within it."""

STOP_SECONDS = 10.0
"""After the end: the longest that farewells are waited for."""

_NICENESS = 10
"""The engine's threads come first: what the bridge does can wait."""

_RECEIVED_AT_ONCE = 16  # drains that wait in the socket

_new_line = msgspec.json.Encoder()


@dataclass(slots=True)
class _Sender:
    records: int = 0
    messages: int = 0
    is_gone: bool = False


@dataclass(slots=True)
class Bridge:
    """The state of the bridge process, apart from its sockets. Times are seconds of the monotonic clock."""

    options: BridgeOptions
    files: ProfileFiles
    began_ns: int = field(default_factory=time.monotonic_ns)
    began_unix_ns: int = field(default_factory=time.time_ns)
    stopped_unix_ns: int | None = None
    num_unread: int = 0  # batches that were no messages
    _senders: dict[str, _Sender] = field(default_factory=dict)
    _joiner: Joiner = field(init=False)
    _written: dict[str, Any] = field(default_factory=dict)
    _flushed: float = 0.0

    def __post_init__(self) -> None:
        num_layers = self.options.meta.model.get("num_layers") or 0
        self._joiner = Joiner(self._write_line, self.began_ns, num_layers)
        self._write_meta()

    def _write_line(self, name: str, line: dict[str, Any]) -> None:
        self.files.write(name, _new_line.encode(line) + b"\n")

    def receive(self, data: bytes, now: float) -> None:
        """Take in one batch of messages of a recorder."""
        try:
            messages = decode_messages(data)
        except msgspec.MsgspecError:
            self.num_unread += 1
            return
        for message in messages:
            self._note_sender(message)
            self._joiner.take(message, now)
        self._joiner.settle(now)

    def _note_sender(self, message: Message) -> None:
        match message:
            case DropsRecord(source, records, num_messages):
                sender = self._senders.setdefault(source, _Sender())
                sender.records, sender.messages = records, num_messages
            case Farewell(source):
                self._senders.setdefault(source, _Sender()).is_gone = True

    def tick(self, now: float) -> bool:
        """Settle and flush, called now and then. Returns whether lines were handed to the system."""
        self._joiner.settle(now)
        if now - self._flushed < FLUSH_SECONDS:
            return False
        self._flushed = now
        self.files.flush()
        self._write_meta()
        return True

    @property
    def has_senders(self) -> bool:
        """Whether any recorder has begun to send and has not said farewell."""
        return any(not sender.is_gone for sender in self._senders.values())

    def finish(self) -> None:
        """Write the lines that are left, and when the profile ended."""
        self._joiner.finish()
        self.files.close()
        self.stopped_unix_ns = time.time_ns()
        self._write_meta()

    @property
    def dropped(self) -> dict[str, int]:
        """Losses of the profile so far, counted by kind: records, messages, lines, files."""
        senders = self._senders.values()
        return {
            "records": sum(sender.records for sender in senders) + self._joiner.num_lost_records,
            "messages": sum(sender.messages for sender in senders) + self.num_unread,
            "lines": self.files.num_lost_lines,
            "files": self.files.num_lost_files,
            "hurried_steps": self._joiner.num_hurried,
            "ops_outside_steps": self._joiner.num_outside,
        }

    @property
    def counts(self) -> dict[str, int]:
        """Lines written so far, by file."""
        return dict(self._joiner.counts)

    def _write_meta(self) -> None:
        changing = {
            "dropped": self.dropped,
            "overlaps": self._joiner.num_overlaps,
            "stopped_unix_ns": self.stopped_unix_ns,
        }
        if changing != self._written:
            self._written = changing
            meta = msgspec.to_builtins(self.options.meta)
            first = {
                "v": SCHEMA_VERSION,
                "schema": SCHEMA,
                "began_unix_ns": self.began_unix_ns,
                "began_monotonic_ns": self.began_ns,
            }
            self.files.write_meta(first | meta | changing)


def _say(message: dict[str, Any]) -> None:
    """A line for the parent, if it is there and listens."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(1, json.dumps(message).encode() + b"\n")


def _run(bridge: Bridge, socket: zmq.Socket[bytes]) -> None:
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(0, zmq.POLLIN)
    ended: float | None = None
    heard = time.monotonic()
    while True:
        ready = dict(poller.poll(100))
        now = time.monotonic()
        if socket in ready:
            heard = now
            for _ in range(_RECEIVED_AT_ONCE):
                if not socket.poll(0):
                    break
                bridge.receive(socket.recv(), now)
        if ended is None and 0 in ready and not os.read(0, 1):
            ended = now
            poller.unregister(0)
        if bridge.tick(now):
            _say({"counts": bridge.counts, "dropped": bridge.dropped})
        if ended is not None:
            patience = SILENCE_SECONDS if bridge.has_senders else _QUIET_SECONDS
            if now - max(heard, ended) >= patience or now - ended >= STOP_SECONDS:
                return


def main() -> int:
    """Run the bridge process. Returns its exit code: 1 once the parent knows why nothing can be written."""
    become("kt-profile")
    leave_signals()
    os.nice(_NICENESS)
    data = read_frame(sys.stdin.buffer)
    if data is None:
        return 1
    options = msgspec.msgpack.decode(data, type=BridgeOptions)
    set_up_logging(options.log_level, "profile", with_time=True)
    os.set_blocking(1, False)
    try:
        files = ProfileFiles(Path(options.folder), options.max_bytes, options.file_bytes)
    except ConfigError as error:
        _say({"error": str(error)})
        return 1
    private = PrivateFolder()
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, _RECEIVED_AT_ONCE)
    endpoint = f"ipc://{private.path / 'profile'}"
    socket.bind(endpoint)
    bridge = Bridge(options, files)
    _say({"endpoint": endpoint})
    try:
        _run(bridge, socket)
    finally:
        bridge.finish()
        context.destroy(linger=0)
        private.remove()
    _say({"counts": bridge.counts, "dropped": bridge.dropped})
    return 0


if __name__ == "__main__":
    sys.exit(main())
