"""Starts processes of a divided model on this machine, for a leader on another one.

A leader connects, both prove that they know one secret, and the connection becomes standard input and output of a new
`kt-rank`: what the two say then is what a leader and its children on its own machine say (messages.py).

    leader                           agent
      <────── greeting, nonce ──────
      ── proof of it, nonce ───────>  closes the connection of who proves nothing
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
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

from ktransformers.child import spawn_code
from ktransformers.errors import ConfigError, EngineError, reason_of

__all__ = ["LEAST_SECRET", "StageAgent", "connect", "keep_alive", "read_secret"]

logger = logging.getLogger(__name__)

LEAST_SECRET = 16
"""Bytes of a secret."""

_GREETING = b"kt-stage 1\n"
_NONCE, _PROOF = 32, 32
_SECONDS = 10.0
"""For one side to prove what it knows."""


def read_secret(path: Path) -> bytes:
    """What is in a file, without white space around it. Raises ConfigError for a file that cannot be one's secret."""
    hint = "make one with: (umask 077; openssl rand -hex 32 > FILE)"
    try:
        content = path.read_bytes().strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"--stage_key_file {path}: {reason_of(error)}; {hint}") from error
    if len(content) < LEAST_SECRET:
        raise ConfigError(f"--stage_key_file {path} has less than {LEAST_SECRET} bytes; {hint}")
    if mode & 0o077:
        logger.warning("%s can be read by others than its owner: chmod 600 %s", path, path)
    return content


def keep_alive(connection: socket.socket) -> None:
    """Find out within half a minute that the machine on the other side is gone."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, "sha256")


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise EngineError("the other side closed the connection")
        data += more
    return data


def connect(host: str, port: int, secret: bytes) -> socket.socket:
    """A connection to a `kt-rank` that an agent has started for it.

    Raises EngineError where there is no agent, or one with another secret.
    """
    where = f"{host}:{port}"
    try:
        connection = socket.create_connection((host, port), timeout=_SECONDS)
    except OSError as error:
        raise EngineError(f"no stage at {where} ({reason_of(error)}): run `ktransformers stage` there") from error
    try:
        if _receive(connection, len(_GREETING)) != _GREETING:
            raise EngineError(f"what answers at {where} is no `ktransformers stage` of this version")
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(_proof(secret, b"leader", _receive(connection, _NONCE)) + nonce)
        if not hmac.compare_digest(_receive(connection, _PROOF), _proof(secret, b"stage", nonce)):
            raise EngineError("it has another secret")
    except (OSError, EngineError) as error:
        connection.close()
        raise EngineError(f"{where} was not convinced ({reason_of(error)}): is --stage_key_file the same?") from error
    connection.settimeout(None)
    keep_alive(connection)
    return connection


class StageAgent:
    """Listens from its making on. One leader at a time: a new one, with the secret, ends the process of the last.

    host, port: 0 for any. command: what is started. Raises ConfigError where it cannot listen.
    """

    def __init__(self, host: str, port: int, secret: bytes, command: Sequence[str] | None = None) -> None:
        self._secret = secret
        self._command = list(command or spawn_code("ktransformers.engine.ranks.follower"))
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {reason_of(error)}; choose another --port") from error
        self.host, self.port = host, int(self._listener.getsockname()[1])
        if not _is_loopback(host):
            logger.warning("listening at %s: what goes over this network is not encrypted", host)

    def serve(self) -> None:
        """Until `close`. Processes die with the thread that calls this."""
        while not self._is_closing:
            try:
                connection, peer = self._listener.accept()
            except OSError as error:
                if not self._is_closing:
                    logger.warning("a connection was not taken: %s", reason_of(error))
                continue
            with connection:
                try:
                    self._check(connection)
                except (OSError, EngineError) as error:
                    logger.warning("%s was refused: %s", peer[0], reason_of(error))
                    continue
                logger.info("a stage for the leader at %s begins", peer[0])
                self._start(connection)
        self._end()

    def _check(self, connection: socket.socket) -> None:
        """Raises EngineError unless the other side knows the secret."""
        connection.settimeout(_SECONDS)
        nonce = secrets.token_bytes(_NONCE)
        connection.sendall(_GREETING + nonce)
        proof, other = _receive(connection, _PROOF), _receive(connection, _NONCE)
        if not hmac.compare_digest(proof, _proof(self._secret, b"leader", nonce)):
            raise EngineError("it has another secret")
        connection.sendall(_proof(self._secret, b"stage", other))
        connection.settimeout(None)
        keep_alive(connection)

    def _start(self, connection: socket.socket) -> None:
        self._end()
        self._process = subprocess.Popen(self._command, stdin=connection.fileno(), stdout=connection.fileno())
        threading.Thread(target=_report, args=(self._process,), name="stage's end", daemon=True).start()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            logger.info("the stage of the leader before ends")
            process.kill()

    def close(self) -> None:
        """End `serve`, which another thread is in."""
        self._is_closing = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            logger.debug("the listener was closed already")
        self._listener.close()


def _report(process: subprocess.Popen[bytes]) -> None:
    code = process.wait()
    logger.info("the stage in process %d has ended with %d", process.pid, code)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
