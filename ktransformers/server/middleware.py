"""What stands in front of the routes: API keys, and limits on the size and the patience of a request's body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ktransformers.errors import AuthenticationError, DeadlineError, KTransformersError, PayloadTooLargeError
from ktransformers.file_kinds import size_of
from ktransformers.server.api_paths import OPEN_PATHS
from ktransformers.server.responses import refuse

__all__ = ["ApiKeys", "BodyLimits"]


class ApiKeys:
    """Lets requests through that carry `Authorization: Bearer KEY` with one of `keys`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]):
        self._app = app
        # Digests of equal length: the time that comparing takes says nothing, not even how long the keys are.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def _is_known(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]  # all of them, always
        return scheme.lower() == b"bearer" and any(matches)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            headers = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(headers) != 1 or not self._is_known(headers[0]):
                what = "the API key is wrong" if headers else "an API key is needed: send Authorization: Bearer KEY"
                await refuse(AuthenticationError(what), scope, receive, send)
                return
        await self._app(scope, receive, send)


class BodyLimits:
    """Refuses bodies over max_body bytes, and clients that send nothing for body_timeout seconds while one is due."""

    def __init__(self, app: ASGIApp, max_body: int, body_timeout: float):
        self._app, self._max_body, self._body_timeout = app, max_body, body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and lengths[0].isdigit() and int(lengths[0]) > self._max_body:
            await refuse(self._too_large(), scope, receive, send)
            return
        has_started, is_complete, total = False, False, 0
        refusal: KTransformersError | None = None

        async def limited() -> Message:
            nonlocal is_complete, total, refusal
            if is_complete:  # what comes now is the client leaving, whenever it likes
                return await receive()
            try:
                async with asyncio.timeout(self._body_timeout):
                    message = await receive()
            except TimeoutError:
                refusal = DeadlineError(f"nothing of the body came for {self._body_timeout} s")
                raise refusal from None
            total += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if total > self._max_body:
                refusal = self._too_large()
                raise refusal
            return message

        async def noting(message: Message) -> None:
            nonlocal has_started
            if refusal is None:  # else it is what the framework makes of our exception
                has_started = True
                await send(message)

        try:
            await self._app(scope, limited, noting)
        except KTransformersError as error:
            if error is not refusal:
                raise
        if refusal is not None and not has_started:
            await refuse(refusal, scope, receive, send)

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is longer than the {size_of(self._max_body)} that this server takes")
