"""Starts processes of a divided model on this machine, for a driver on another one.

A driver connects, both prove that they know one secret, and the connection becomes standard input and output of a new
`kt-rank`: what the two say then is what a driver and its children on its own machine say (messages.py).

    driver                           agent
      <────── greeting, nonce ──────
      ── proof of it, nonce ───────>  zeros for a wrong one, and the end; 10 s for all of this
      <────── proof of that ────────
      ═══════ frames ═══════════════  kt-rank

A proof is HMAC-SHA256 of a nonce under the secret, with the name of the side that gives it. Nothing is encrypted: this
is for networks that are one's own, as torch.distributed is, over which hidden states go.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from ktransformers.errors import ConfigError, EngineError, reason_of
from ktransformers.system.child import spawn_code
from ktransformers.system.process_group import ChildProcess, ProcessGroup, Program
from ktransformers.system.user_files import read_named

__all__ = ["LEAST_SECRET", "MOST_PENDING", "StageAgent", "connect", "keep_alive", "read_secret"]

logger = logging.getLogger(__name__)

LEAST_SECRET = 16
"""Bytes of a secret."""

_GREETING = b"kt-stage 2\n"
_NONCE, _PROOF = 32, 32
_REFUSAL = bytes(_PROOF)
"""Sent instead of a proof to who has another secret."""
_SECONDS = 10.0
"""For all of one handshake."""

MOST_PENDING = 16
"""Connections that have not proven anything yet."""

_DEAF_SECONDS = 1.0
"""Without new connections where the system gives none, for want of descriptors."""
_QUIET_SECONDS, _MOST_REFUSED = 60.0, 1000


def read_secret(path: Path) -> bytes:
    """Read the secret in a file, without white space around it. Raises ConfigError for a file that cannot be one's
    secret."""
    hint = "make one with: (umask 077; openssl rand -hex 32 > FILE)"
    try:
        content = read_named(path).strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--stage_key_file {path}: {reason_of(error)}; {hint}") from error
    if len(content) < LEAST_SECRET:
        raise ConfigError(f"--stage_key_file {path} has less than {LEAST_SECRET} bytes; {hint}")
    if mode & 0o077:
        logger.warning("%s can be read by others than its owner: chmod 600 %s", path, path)
    return content


def keep_alive(connection: socket.socket) -> None:
    """Have a connection fail within half a minute after the machine on the other side is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, "sha256")


class _Handshake:
    """The agent's side of one connection that has not proven anything yet. It never blocks.

    deadline: of time.monotonic(), for all of it, however the bytes come.
    """

    def __init__(self, connection: socket.socket, peer: str, secret: bytes, deadline: float) -> None:
        self.connection, self.peer, self.deadline = connection, peer, deadline
        self._secret, self._nonce, self._data = secret, secrets.token_bytes(_NONCE), b""
        connection.setblocking(False)

    def begin(self) -> None:
        """Sends the greeting. Raises OSError."""
        self._send(_GREETING + self._nonce)

    def go_on(self) -> bool:
        """Reads what has come; true once the other side has proven that it knows the secret.

        Raises EngineError when it does not, or is gone, OSError from its connection.
        """
        wanted = _PROOF + _NONCE
        more = self.connection.recv(wanted - len(self._data))
        if not more:
            raise EngineError("the other side closed the connection")
        self._data += more
        if len(self._data) < wanted:
            return False
        proof, other = self._data[:_PROOF], self._data[_PROOF:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"leader", self._nonce)):
            self._send(_REFUSAL)
            raise EngineError("it has another secret")
        self._send(_proof(self._secret, b"stage", other))
        return True

    def _send(self, data: bytes) -> None:
        """These few bytes always fit into the buffer of a new connection."""
        if self.connection.send(data) < len(data):
            raise EngineError("the other side reads nothing")


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    """Raises OSError, TimeoutError for a deadline that has passed, and _ClosedError."""
    data = b""
    while len(data) < size:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        more = connection.recv(size - len(data))
        if not more:
            raise _ClosedError
        data += more
    return data


class _ClosedError(Exception):
    """The other side has closed the connection."""


def connect(host: str, port: int, secret: bytes) -> socket.socket:
    """Connects to an agent, which starts a `kt-rank` for this connection. Takes at most some ten seconds.

    Raises EngineError where there is no agent, one that does not answer, or one with another secret.
    """
    where = f"{host}:{port}"
    deadline = time.monotonic() + _SECONDS
    try:
        connection = socket.create_connection((host, port), timeout=_SECONDS)
    except OSError as error:
        raise EngineError(f"no stage at {where} ({reason_of(error)}): run `ktransformers stage` there") from error
    try:
        _prove(connection, where, secret, deadline)
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    keep_alive(connection)
    return connection


def _prove(connection: socket.socket, where: str, secret: bytes, deadline: float) -> None:
    """The driver's side. Raises EngineError, which names the key file only where it is at fault."""
    try:
        if _receive(connection, len(_GREETING), deadline) != _GREETING:
            raise EngineError(f"what answers at {where} is no `ktransformers stage` of this version")
        nonce = secrets.token_bytes(_NONCE)
        proof = _proof(secret, b"leader", _receive(connection, _NONCE, deadline))
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.sendall(proof + nonce)
        answer = _receive(connection, _PROOF, deadline)
    except TimeoutError as error:
        raise EngineError(
            f"{where} takes connections and did not answer within {_SECONDS:.0f} s: it is busy, or it is no "
            "`ktransformers stage`; its log says which"
        ) from error
    except (_ClosedError, OSError) as error:
        why = "" if isinstance(error, _ClosedError) else f" ({reason_of(error)})"
        raise EngineError(
            f"{where} closed the connection before it had answered{why}: it is busy, ends, or is no "
            "`ktransformers stage`; its log says why"
        ) from error
    if not hmac.compare_digest(answer, _proof(secret, b"stage", nonce)):
        raise EngineError(f"{where} was not convinced (it has another secret): is --stage_key_file the same?")


class StageAgent:
    """A listener that starts a `kt-rank` for a driver with the secret. One driver at a time: a new one, with the
    secret, ends the process of the last.

    Handshakes go on side by side on the one thread of `serve`: a connection that says nothing, or says it slowly,
    keeps nobody out. Of more than MOST_PENDING the oldest is closed, of the address that has the most.

    host, port: 0 for any. command: what is started. Raises ConfigError where it cannot listen.
    """

    def __init__(self, host: str, port: int, secret: bytes, command: Sequence[str] | None = None) -> None:
        self._secret = secret
        self._command = list(command or spawn_code("ktransformers.engine.load.worker"))
        self._processes = ProcessGroup()
        self._process: ChildProcess | None = None
        self._is_closing = False
        self._pending: list[_Handshake] = []  # the oldest first
        self._deaf_until = 0.0  # while there are no descriptors for another connection
        self._refused: dict[tuple[str, str], float] = {}  # when it was logged, by address and reason
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {reason_of(error)}; choose another --port") from error
        self._listener.setblocking(False)
        self._wakes, self._wake = socket.socketpair()  # a select that a signal interrupts is begun again
        self.host, self.port = host, int(self._listener.getsockname()[1])
        if not _is_loopback(host):
            logger.warning("listening at %s: what goes over this network is not encrypted", host)

    def serve(self) -> None:
        """Serve drivers until `close`, and end the process of the last one then."""
        while not self._is_closing:
            now = time.monotonic()
            self._drop_late(now)
            waits = [one.deadline - now for one in self._pending[:1]]
            if self._deaf_until > now:
                waits.append(self._deaf_until - now)
            for ready in self._ready(min(waits, default=None), self._deaf_until <= now):
                if isinstance(ready, _Handshake):
                    self._go_on(ready)
                else:
                    self._accept()
        for one in self._pending:
            one.connection.close()
        self._pending.clear()
        self._end()
        self._processes.close()
        self._wakes.close()

    def _ready(self, seconds: float | None, listens: bool) -> list[_Handshake | None]:
        """Handshakes of which something has come; None for a new connection. Empty when it is to end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._wakes, selectors.EVENT_READ)
            for one in self._pending:
                selector.register(one.connection, selectors.EVENT_READ, one)
            try:
                if listens:
                    selector.register(self._listener, selectors.EVENT_READ)
            except ValueError:  # it was closed just now
                return []
            found = selector.select(seconds)
        is_over = self._is_closing or any(key.fileobj is self._wakes for key, _ in found)
        return [] if is_over else [key.data for key, _ in found]

    def _accept(self) -> None:
        try:
            connection, peer = self._listener.accept()
        except BlockingIOError:  # it has left again
            return
        except OSError as error:
            if not self._is_closing:
                logger.warning("a connection was not taken: %s", reason_of(error))
                self._deaf_until = time.monotonic() + _DEAF_SECONDS
            return
        one = _Handshake(connection, str(peer[0]), self._secret, time.monotonic() + _SECONDS)
        self._pending.append(one)
        try:
            one.begin()
        except (OSError, EngineError) as error:
            self._drop(one, reason_of(error))
        if len(self._pending) > MOST_PENDING:
            counts = Counter(other.peer for other in self._pending)
            crowd = max(counts.values())
            oldest = next(other for other in self._pending if counts[other.peer] == crowd)
            self._drop(oldest, f"{MOST_PENDING} others wait to prove who they are")

    def _go_on(self, one: _Handshake) -> None:
        if one not in self._pending:  # dropped for another one just now
            return
        try:
            if not one.go_on():
                return
            one.connection.settimeout(None)
            keep_alive(one.connection)
        except BlockingIOError:
            return
        except (OSError, EngineError) as error:
            self._drop(one, reason_of(error))
            return
        self._pending.remove(one)
        with one.connection:
            logger.info("a stage for the driver at %s begins", one.peer)
            self._start(one.connection)

    def _drop_late(self, now: float) -> None:
        while self._pending and self._pending[0].deadline <= now:
            self._drop(self._pending[0], f"it proved nothing within {_SECONDS:.0f} s")

    def _drop(self, one: _Handshake, reason: str) -> None:
        """The same of one address is logged once a minute: strangers must not fill the log."""
        self._pending.remove(one)
        one.connection.close()
        now, what = time.monotonic(), (one.peer, reason)
        if now - self._refused.get(what, -_QUIET_SECONDS) >= _QUIET_SECONDS:
            if len(self._refused) >= _MOST_REFUSED:
                self._refused.clear()
            self._refused[what] = now
            logger.warning("%s was refused: %s", one.peer, reason)

    def _start(self, connection: socket.socket) -> None:
        self._end()
        program = Program("a stage", self._command, stdin=connection.fileno(), stdout=connection.fileno())
        try:
            process = self._process = self._processes.start(program)
        except EngineError as error:
            logger.error("%s; the driver's connection is closed", error)
            return
        pid = process.pid
        process.on_end(lambda code: logger.info("the stage in process %d has ended with %d", pid, code))

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.returncode is None:
            logger.info("the stage of the driver before ends")
            process.kill()

    def close(self) -> None:
        """End `serve`, which another thread is in, or which a signal has interrupted. Safe to call twice."""
        self._is_closing = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the listener was closed already")
        self._listener.close()
        self._wake.close()  # the other end can be read from now on


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
