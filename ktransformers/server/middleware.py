"""Middleware in front of the routes: who may ask (API keys, hosts, origins), and how large and slow a body may be."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktransformers.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    KTransformersError,
    MisdirectedRequestError,
    OriginError,
    PayloadTooLargeError,
    QueueFullError,
)
from ktransformers.server.http.api_paths import LOCAL_PATHS, SCOPE_KEY, USE_KEY, is_open, plain_path
from ktransformers.server.http.hosts import HostRule
from ktransformers.server.http.keys import KeyLimits, KeyUse
from ktransformers.server.responses import refuse
from ktransformers.server.telemetry.request_log import note_key
from ktransformers.system.file_kinds import size_of

__all__ = ["ApiKeys", "BodyLimits", "PlainPaths", "SameSite"]

_MIN_RATE = 4 << 10  # bytes per second of a body that takes longer than its timeout
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
"""Headers of proxies: what comes with one does not come from this machine, whatever its address says."""
_BODIES_IN_MEMORY = 16  # of the largest size, all requests that are being answered together


class ApiKeys:
    """Lets only requests through that carry one of `keys`: `Authorization: Bearer KEY`, or `x-api-key: KEY`.

    local: set where only this machine can connect; what is in LOCAL_PATHS then needs no key, unless it comes through a
    proxy, or by a host name that a web page may have pointed here.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], limits: Mapping[str, KeyLimits], local: HostRule | None = None
    ):
        self._app, self._local = app, local
        # Digests of equal length: the time that comparing takes says nothing, not even how long the keys are.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._uses = [KeyUse(f"key {index + 1}", limits.get(key)) for index, key in enumerate(keys)]

    def _known(self, key: bytes) -> int | None:
        """Which of the keys this is."""
        digest = hashlib.sha256(key).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        return matches.index(True) if any(matches) else None

    def _key_of(self, scope: Scope) -> int | None:
        """Which key the request carries. Raises AuthenticationError for a wrong one; None: it carries none."""
        bearer = [value for name, value in scope["headers"] if name == b"authorization"]
        plain = [value for name, value in scope["headers"] if name == b"x-api-key"]
        given = [value.strip() for value in plain]
        for value in bearer:
            scheme, _, key = value.partition(b" ")
            given.append(key.strip() if scheme.lower() == b"bearer" else b"")
        if not given:
            return None
        known = [self._known(key) for key in given]
        right = [index for index in known if index is not None]
        if not right or len(bearer) > 1 or len(plain) > 1:  # two of a kind: others on the way may have read the other
            raise AuthenticationError("the API key is wrong")
        return right[-1]

    def _is_free(self, scope: Scope) -> bool:
        if is_open(scope["path"]):
            return True
        if self._local is None or scope["path"] not in LOCAL_PATHS:
            return False
        names = {name for name, _ in scope["headers"]}
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        return not names & _FORWARDED and all(self._local.allows(host) for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http" or self._is_free(scope):
            await self._app(scope, receive, send)
            return
        try:
            known = self._key_of(scope)
            if known is None:
                raise AuthenticationError("an API key is needed: send Authorization: Bearer KEY, or x-api-key: KEY")
        except AuthenticationError as error:
            await refuse(error, scope, receive, send)
            return
        use = self._uses[known]
        scope[SCOPE_KEY], scope[USE_KEY] = str(known), use
        note_key(scope, use.name)

        async def with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *use.headers()]
            await send(message)

        await self._app(scope, receive, with_limits)


class SameSite:
    """Keeps web pages of other sites out: browsers send their requests to loopback addresses, too.

    Browsers say in Origin whose page asks; pages of this server and of cors_origins may. A page whose host name was
    bound to this server's address meanwhile says so in Host. Programs send no Origin; HTTP/1.0 may leave out Host.
    """

    def __init__(self, app: ASGIApp, hosts: HostRule, cors_origins: Sequence[str]):
        self._app, self._hosts, self._origins = app, hosts, frozenset(cors_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        error = self._wrong(scope) if scope["type"] == "http" else None
        if error is not None:
            await refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _wrong(self, scope: Scope) -> KTransformersError | None:
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), None)
        if host is not None and not self._hosts.allows(host):
            return MisdirectedRequestError(
                f"this server is not {host[:200]!r}; if it is meant to be reached by that name, start it with "
                "--allowed_hosts NAME"
            )
        for name, value in scope["headers"]:
            origin = value.decode("latin-1")
            if name == b"origin" and not self._may_ask(origin, host):
                return OriginError(
                    f"web pages of {origin[:200]!r} may not use this server; if they are meant to, start it with "
                    "--cors_origins ORIGIN"
                )
        return None

    def _may_ask(self, origin: str, host: str | None) -> bool:
        if origin in self._origins or "*" in self._origins:
            return True
        return host is not None and origin.lower() in (f"http://{host.lower()}", f"https://{host.lower()}")


class PlainPaths:
    """Lets paths have doubled slashes and one at the end, and answers HEAD wherever GET is answered."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = plain_path(scope["path"])
        plain = scope if path == scope["path"] else {**scope, "path": path, "raw_path": quote(path).encode()}
        if scope["method"] != "HEAD":
            await self._app(plain, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**plain, "method": "GET"}, receive, without_body)


class BodyLimits:
    """Refuses bodies over max_body() bytes, and clients that send them too slowly.

    Too slowly: nothing for body_timeout seconds while some is due, or in all less than _MIN_RATE for longer than that.
    Bodies are in memory until their requests are answered: beyond _BODIES_IN_MEMORY of the largest ones no more are
    taken. A body whose end is announced in two ways (Content-Length and Transfer-Encoding) is refused, because others
    on the way may have read it differently (RFC 9112, 6.3).
    """

    def __init__(self, app: ASGIApp, max_body: Callable[[], int], body_timeout: float):
        self._app, self._max_body, self._body_timeout = app, max_body, body_timeout
        self._num_held = 0  # bytes of all bodies that are in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_body = self._max_body()
        refusal = _wrong_framing(scope, max_body)
        if refusal is not None:
            await refuse(refusal, scope, receive, send, closes=True)
            return
        body = _Body(receive, max_body, self._body_timeout)
        has_started = False

        async def limited() -> Message:
            before = body.num_bytes
            message = await body.receive()
            self._num_held += body.num_bytes - before
            if self._num_held > _BODIES_IN_MEMORY * max_body:
                body.refusal = QueueFullError("too many large requests are being answered; try again in a moment")
                raise body.refusal
            return message

        async def noting(message: Message) -> None:
            nonlocal has_started
            if body.refusal is None:  # else it is what the framework makes of our exception
                has_started = True
                await send(message)

        try:
            await self._app(scope, limited, noting)
        except KTransformersError as error:
            if error is not body.refusal:
                raise
        finally:
            self._num_held -= body.num_bytes
        if body.refusal is not None and not has_started:
            await refuse(body.refusal, scope, receive, send, closes=True)


class _Body:
    """One body on its way in. refusal: what was raised about it."""

    def __init__(self, receive: Receive, max_body: int, timeout: float):
        self._receive, self._max_body, self._timeout = receive, max_body, timeout
        self._is_complete = False
        self._waited = 0.0  # for the client, all messages together
        self.num_bytes = 0
        self.refusal: KTransformersError | None = None

    async def receive(self) -> Message:
        """The next message. Raises what is wrong with the body."""
        if self._is_complete:  # what comes now is the client leaving, whenever it likes
            return await self._receive()
        loop = asyncio.get_running_loop()
        began = loop.time()
        left = self._timeout + self.num_bytes / _MIN_RATE - self._waited
        try:
            async with asyncio.timeout(max(min(self._timeout, left), 0.0)):
                message = await self._receive()
        except TimeoutError:
            what = "nothing of the body came" if left > self._timeout else "the body did not come"
            self.refusal = DeadlineError(f"{what} for {self._timeout:g} s: {self.num_bytes} bytes were received")
            raise self.refusal from None
        self._waited += loop.time() - began
        self.num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)
        if self.num_bytes > self._max_body:
            self.refusal = _too_large(self._max_body)
            raise self.refusal
        return message


def _wrong_framing(scope: Scope, max_body: int) -> KTransformersError | None:
    names = [name for name, _ in scope["headers"]]
    if b"content-length" in names and b"transfer-encoding" in names:
        return ConfigError("send either Content-Length or Transfer-Encoding, not both")
    lengths = [value for name, value in scope["headers"] if name == b"content-length"]
    if lengths and lengths[0].isdigit() and int(lengths[0]) > max_body:
        return _too_large(max_body)
    return None


def _too_large(max_body: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is longer than the {size_of(max_body)} that this server takes: its largest prompt needs no more"
    )
