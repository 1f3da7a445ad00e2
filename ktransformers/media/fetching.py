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
import socket
import ssl
import threading
import time
from collections.abc import Iterator, Sequence
from urllib.parse import SplitResult, unquote_to_bytes, urljoin, urlsplit

from ktransformers.errors import ConfigError, reason_of
from ktransformers.media.limits import MAX_NBYTES

__all__ = ["data_of", "fetch", "is_allowed"]

_MOST_REDIRECTS = 3
_SECONDS = 20.0
"""For all of it, redirects too."""

_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_AGENT = "ktransformers"


def fetch(url: str, allowed_hosts: Sequence[str] = ()) -> bytes:
    """Return what a URL names. Blocks; call it on a thread.

    allowed_hosts: names of hosts, and *.example.org for all below example.org. A host that is named itself may have an
    address of the local network. Raises ConfigError, with words for whoever sent the URL.
    """
    if url[:5].lower() == "data:":
        return data_of(url)
    until = time.monotonic() + _SECONDS
    for _ in range(_MOST_REDIRECTS + 1):
        found = _asked(url, allowed_hosts, until)
        if isinstance(found, bytes):
            return found
        url = found
    raise ConfigError(f"the picture's URL redirects more than {_MOST_REDIRECTS} times")


def data_of(url: str) -> bytes:
    """Return the bytes in a `data:` URL (RFC 2397). Raises ConfigError for what is none."""
    head, comma, body = url.partition(",")
    if head[:5].lower() != "data:" or not comma:
        raise ConfigError("a data URL is data:image/png;base64,... with the picture's bytes")
    if not head.lower().endswith(";base64"):
        return unquote_to_bytes(body)
    try:
        return base64.b64decode("".join(body.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError(f"the data URL is not base64: {reason_of(error)}") from error


def is_allowed(host: str, allowed_hosts: Sequence[str]) -> bool:
    """Whether a host is allowed: by its own name, or below a *.domain."""
    host = host.rstrip(".").lower()
    return any(host == one or (one.startswith("*.") and host.endswith(one[1:])) for one in _lower(allowed_hosts))


def _lower(hosts: Sequence[str]) -> list[str]:
    return [host.rstrip(".").lower() for host in hosts]


def _asked(url: str, allowed_hosts: Sequence[str], until: float) -> bytes | str:
    """The body of an answer, or where it redirects to."""
    parts, host, port = _parsed(url)
    if not is_allowed(host, allowed_hosts):
        how = "name its host in --allowed_image_hosts" if not allowed_hosts else "it is not in --allowed_image_hosts"
        raise ConfigError(
            f"pictures are not fetched from {host}: {how}, or send the picture itself, as a data URL in base64"
        )
    address = _address(host, port, is_named=host in _lower(allowed_hosts))
    try:
        with _connection(parts.scheme, host, port, address, until) as connection:
            path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("GET", path, headers={"User-Agent": _AGENT, "Accept": "image/*", "Connection": "close"})
            with connection.getresponse() as response:
                target = response.getheader("Location")
                if response.status in _REDIRECTS and target:
                    return urljoin(url, target)
                if response.status != 200:
                    raise ConfigError(f"{host} answers the picture's URL with status {response.status}")
                body = _body(response)
            _left(until)  # what was cut in time looks like an end
            return body
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
