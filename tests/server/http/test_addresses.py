"""--host and --port that cannot be listened on: the line says which of the two is wrong, and what would do."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from ktransformers.errors import ConfigError, ListenError
from ktransformers.server import listening
from ktransformers.server.config import ServerConfig

HAS_V6 = socket.has_ipv6


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("999.1.1.1", "must be an address or a name of this machine: 127.0.0.1"),
        ("256.0.0.1", "must be an address or a name of this machine"),
        ("no-such-name.invalid", "must be an address or a name of this machine"),
        ("two words", "must be an address or a name of this machine"),
        ("a" * 300, "must be an address or a name of this machine"),
        (":::1", "must be an address or a name of this machine"),
        ("192.0.2.1", "--host must be an address of this machine: 127.0.0.1"),  # for documentation, RFC 5737
        ("203.0.113.77", "--host must be an address of this machine"),
        ("http://127.0.0.1", "--host is an address alone, without http://"),
        ("127.0.0.1/24", "--host is an address alone, without http:// and path"),
        ("127.0.0.1:8000", "the port is --port 8000"),
        ("localhost:8000", "the port is --port 8000"),
        ("[::1]:8000", "the port is --port 8000"),
    ],
)
def test_a_host_that_cannot_be_listened_on(host: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        listening.bind(ServerConfig(host=host, port=0))
    assert says in str(caught.value)
    assert str(caught.value).startswith("cannot listen on ")
    assert "choose another --port" not in str(caught.value)


def test_a_port_that_another_program_has() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"127.0.0.1:{port}: Address already in use; choose another --port"):
            listening.bind(ServerConfig(port=port))


def test_a_port_that_needs_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("socket.socket.bind", refuse)
    with pytest.raises(ConfigError, match="Permission denied; ports below 1024 need privileges: choose another --port"):
        listening.bind(ServerConfig(port=80))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "127.1", *(["::1", "::"] if HAS_V6 else [])])
def test_hosts_that_can(host: str) -> None:
    listener = listening.bind(ServerConfig(host=host, port=0))
    with listener:
        assert listener.proto == socket.IPPROTO_TCP
        assert listener.getsockname()[1] > 0


def test_a_name_of_several_addresses_takes_the_first_that_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*args: Any, **kwargs: Any) -> list[Any]:
        kind = (socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
        return [
            (socket.AF_INET6, *kind, ("2001:db8::1", 0, 0, 0)),
            (socket.AF_INET, *kind, ("192.0.2.1", 0)),
            (socket.AF_INET, *kind, ("127.0.0.1", 0)),
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with listening.bind(ServerConfig(host="a-name", port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
