"""The names by which a server is meant to be reached. Knows Host headers, not HTTP."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

__all__ = ["HostRule"]

_LOOPBACK = "localhost"


class HostRule:
    """The host names by which a server may be reached. allowed: names beside loopback ones; * for all, *.example.com
    for all below one. bound: the address listened on.

    A server that listens on all addresses of the machine (0.0.0.0, ::) goes by any address, and by the machine's name:
    whoever makes a browser ask the wrong server does it by a name of his own.
    """

    def __init__(self, allowed: Sequence[str], bound: str):
        names = {name.lower().rstrip(".") for name in allowed}
        self._is_open = "*" in names
        self._suffixes = (f".{_LOOPBACK}", *(name[1:] for name in names if name.startswith("*.")))
        self._names = names | {_LOOPBACK, bound.lower()}
        address = _address(bound)
        self._takes_addresses = address is not None and address.is_unspecified
        if self._takes_addresses:
            own = socket.gethostname().lower()
            self._names |= {own, own.partition(".")[0]}

    def allows(self, host: str) -> bool:
        """Whether `host`, a Host header with or without a port, names this server."""
        if self._is_open:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:  # brackets that do not match
            return False
        address = _address(name)
        if address is not None:
            return self._takes_addresses or address.is_loopback or name in self._names
        return name in self._names or name.endswith(self._suffixes)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
