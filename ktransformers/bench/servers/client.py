"""A client of a running server that times its answers: the standard library only, one connection a request."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ktransformers.errors import KTransformersError

__all__ = ["Client", "RequestError"]


class RequestError(KTransformersError):
    """The server cannot be reached, refuses a request, or breaks an answer off."""


class Client:
    """Asks the server at `url`, with or without /v1 at its end. timeout: seconds between two bytes."""

    def __init__(self, url: str, api_key: str = "", timeout: float = 1200.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        self._is_tls, self.host = parts.scheme == "https", parts.netloc
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout

    def text(self, method: str, path: str, body: Any = None) -> str:
        """Send a request and return the whole answer. Raises RequestError."""
        with self._answer(method, path, body) as response:
            return response.read().decode()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the whole answer as parsed JSON. Raises RequestError."""
        try:
            return json.loads(self.text(method, path, body))
        except ValueError as error:
            raise RequestError(f"{method} {path}: {error}") from error

    def events(self, path: str, body: Any) -> Generator[dict[str, Any]]:
        """Yield the objects of a streamed answer as they come. Closing the iterator leaves. Raises RequestError."""
        with self._answer("POST", path, body) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RequestError(str(event["error"]))
                    yield event
                elif line.startswith(b"data: [DONE]"):
                    return
        raise RequestError(f"POST {path}: the stream ended without [DONE]")

    @contextmanager
    def _answer(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        connection = kind(self.host, timeout=self._timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, self._prefix + path, data, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                text = response.read(300).decode(errors="replace")
                raise RequestError(f"{method} {path}: {response.status} {text}")
            yield response
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RequestError(f"{method} {path}: {error!r}") from error
        finally:
            connection.close()
