"""Pictures that are named by a URL: `data:` always, `http(s):` from hosts that are allowed by name.

    URL ── host allowed? ── its addresses, public? ── connect to one of these, by its number ── at most 3 redirects,
    each checked as the first ── status, size, time ──> bytes

Whoever may name a URL could else let the server ask machines of its own network. So an address is looked up once, and
the one that was checked is connected to. What comes is not believed to be a picture: the decoder looks.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import ipaddress
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, unquote, unquote_to_bytes, urljoin, urlsplit

from ktransformers.errors import ConfigError, reason_of
from ktransformers.media.limits import MAX_NBYTES

__all__ = ["Version", "base64_bytes", "check_allowed", "data_of", "fetch", "fetch_if_changed", "is_allowed"]

_MOST_REDIRECTS = 3
_SECONDS = 20.0
"""For all of it, redirects too."""

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"User-Agent": "ktransformers", "Accept": "image/*", "Connection": "close"}
_QUESTIONS = {"ETag": "If-None-Match", "Last-Modified": "If-Modified-Since"}
"""Headers of an answer, and those that ask whether it is still the same."""

_MOST_CHARS = 256
"""Of such a header."""

_MAX_AGE = re.compile(r"\bmax-age=(\d{1,9})\b")


@dataclass(frozen=True, slots=True)
class Version:
    """What a server says of the bytes that it sent, so that it can be asked whether they are still the same. url: where
    redirects ended. headers: of that question; none where it says nothing. seconds: for which it need not be asked;
    None: it does not say."""

    url: str
    headers: Mapping[str, str]
    seconds: float | None


def fetch(url: str, allowed_hosts: Sequence[str] = ()) -> bytes:
    """Return what a URL names. Blocks; call it on a thread.

    allowed_hosts: names of hosts, and *.example.org for all below example.org. A host that is named itself may have an
    address of the local network. Raises ConfigError, with words for whoever sent the URL.
    """
    if url[:5].lower() == "data:":
        return data_of(url)
    found = fetch_if_changed(url, allowed_hosts)
    assert found is not None, "no version is known"
    return found[0]


def fetch_if_changed(
    url: str, allowed_hosts: Sequence[str], known: Version | None = None
) -> tuple[bytes, Version] | None:
    """Return what an http(s) URL names, and its version; None where that is the known one. Errors as `fetch`."""
    until = time.monotonic() + _SECONDS
    for _ in range(_MOST_REDIRECTS + 1):
        found = _asked(url, allowed_hosts, until, known)
        if not isinstance(found, str):
            return found
        url = found
    raise ConfigError(f"the picture's URL redirects more than {_MOST_REDIRECTS} times")


def data_of(url: str) -> bytes:
    """Return the bytes in a `data:` URL (RFC 2397), whose base64 may have characters as %2B. Raises ConfigError for
    what is none."""
    head, comma, body = url.partition(",")
    if head[:5].lower() != "data:" or not comma:
        raise ConfigError("a data URL is data:image/png;base64,... with the picture's bytes")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64_bytes(unquote(body) if "%" in body else body)
    except ConfigError as error:
        raise ConfigError(f"the data URL is not base64: {error}") from error


def base64_bytes(text: str) -> bytes:
    """Return the bytes in base64 as browsers take it (WHATWG's forgiving-base64 decode: white space and missing padding
    are allowed), or in its alphabet for URLs (RFC 4648). Raises ConfigError for what is none."""
    packed = "".join(text.split()).replace("-", "+").replace("_", "/")
    try:
        return base64.b64decode(packed + "=" * (-len(packed) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(reason_of(error)) from error


def is_allowed(host: str, allowed_hosts: Sequence[str]) -> bool:
    """Whether a host is allowed: by its own name, or below a *.domain."""
    host = host.rstrip(".").lower()
    return any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in _lower(allowed_hosts))


def check_allowed(url: str, allowed_hosts: Sequence[str]) -> tuple[SplitResult, str, int]:
    """Return an http(s) URL's parts, its host and its port. Raises ConfigError for one whose host is not allowed."""
    parts, host, port = _parsed(url)
    if not is_allowed(host, allowed_hosts):
        how = "name its host in --allowed_image_hosts" if not allowed_hosts else "it is not in --allowed_image_hosts"
        raise ConfigError(
            f"pictures are not fetched from {host}: {how}, or send the picture itself, as a data URL in base64"
        )
    return parts, host, port


def _lower(hosts: Sequence[str]) -> list[str]:
    return [host.rstrip(".").lower() for host in hosts]


def _asked(
    url: str, allowed_hosts: Sequence[str], until: float, known: Version | None
) -> tuple[bytes, Version] | str | None:
    """The body of an answer, or where it redirects to; None: it is the known one."""
    parts, host, port = check_allowed(url, allowed_hosts)
    question = known.headers if known is not None and known.url == url else {}
    address = _address(host, port, is_named=host in _lower(allowed_hosts))
    try:
        with _connection(parts.scheme, host, port, address, until) as connection:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={**_HEADERS, **question})
            with connection.getresponse() as response:
                target = response.getheader("Location")
                if response.status in _REDIRECTS and target:
                    return urljoin(url, target)
                if response.status == 304 and question:
                    return None
                if response.status != 200:
                    raise ConfigError(f"{host} answers the picture's URL with status {response.status}")
                body, version = _body(response), _version(url, response)
            _left(until)  # what was cut in time looks like an end
            return body, version
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        is_late = isinstance(error, TimeoutError) or time.monotonic() >= until
        why = f"it takes more than {_SECONDS:.0f} s" if is_late else reason_of(error)
        raise ConfigError(f"the picture cannot be fetched from {host}: {why}") from error


def _parsed(url: str) -> tuple[SplitResult, str, int]:
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError as error:
        raise ConfigError(f"the picture's URL cannot be read: {reason_of(error)}") from error
    if parts.scheme not in _PORTS:
        raise ConfigError(f"a picture's URL begins with data:, http: or https:, got {url[:40]!r}")
    if not host or parts.username is not None or not url.isascii() or any(letter <= " " for letter in url):
        raise ConfigError("the picture's URL has no host, or a user's name, spaces or letters that a URL cannot have")
    return parts, host.lower(), port or _PORTS[parts.scheme]


def _address(host: str, port: int, *, is_named: bool) -> str:
    """An address of the host, all of whose addresses are public unless it is named itself."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"the host {host} of the picture's URL is not known: {reason_of(error)}") from error
    addresses = [str(one[4][0]) for one in found]
    inside = [one for one in addresses if not _is_public(one)]
    if not addresses or (inside and not is_named):
        raise ConfigError(f"the host {host} of the picture's URL has an address that is not public")
    return addresses[0]


def _is_public(address: str) -> bool:
    found = ipaddress.ip_address(address.partition("%")[0])
    embedded = None
    if isinstance(found, ipaddress.IPv6Address):  # addresses that lead to those of IPv4 in them
        embedded = found.ipv4_mapped or found.sixtofour or (found.teredo[1] if found.teredo else None)
        if embedded is None and found in _NAT64:
            embedded = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
    return all(one.is_global and not one.is_multicast for one in (found, embedded) if one is not None)


_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


@contextlib.contextmanager
def _connection(scheme: str, host: str, port: int, address: str, until: float) -> Iterator[http.client.HTTPConnection]:
    """A connection to the address that was checked, as to this host; it is cut in time, however the answer trickles."""
    made = (
        http.client.HTTPSConnection(host, port, context=ssl.create_default_context())
        if scheme == "https"
        else http.client.HTTPConnection(host, port)
    )
    with contextlib.ExitStack() as stack:
        stack.callback(made.close)

        def connect(_: tuple[str, int], *args: object, **kwargs: object) -> socket.socket:
            found = socket.create_connection((address, port), timeout=_left(until))
            same = stack.enter_context(found.dup())  # TLS takes the socket itself
            timer = threading.Timer(_left(until), _cut, [same])
            timer.daemon = True
            timer.start()
            stack.callback(timer.cancel)
            return found

        made._create_connection = connect  # type: ignore[attr-defined]
        yield made


def _cut(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is over already
        connected.shutdown(socket.SHUT_RDWR)


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _version(url: str, response: http.client.HTTPResponse) -> Version:
    found = {asks: response.getheader(name, "") for name, asks in _QUESTIONS.items()}
    headers = {name: text for name, text in found.items() if 0 < len(text) <= _MOST_CHARS and text.isprintable()}
    said = response.getheader("Cache-Control", "").lower()
    age = _MAX_AGE.search(said)
    if "no-store" in said or "no-cache" in said:
        return Version(url, headers, 0.0)
    return Version(url, headers, None if age is None else float(age[1]))


def _body(response: http.client.HTTPResponse) -> bytes:
    """Raises ConfigError for one that is too long."""
    length = response.length
    if length is not None and length > MAX_NBYTES:
        raise ConfigError(f"the picture behind the URL has {length} bytes; at most {MAX_NBYTES} are read")
    made = response.read(MAX_NBYTES + 1)
    if len(made) > MAX_NBYTES:
        raise ConfigError(f"the picture behind the URL has more than {MAX_NBYTES} bytes")
    if length is not None and len(made) < length:
        raise ConfigError(f"the picture behind the URL ends after {len(made)} of {length} bytes")
    return made
