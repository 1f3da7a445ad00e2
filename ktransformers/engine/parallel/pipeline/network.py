"""Finds which address and interface of this machine lead to another one, and where the processes of a model meet."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

from torch import distributed

from ktransformers.errors import EngineError, reason_of

__all__ = ["local_address", "local_interface", "rendezvous_store"]

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR of Linux


def local_address(host: str) -> str:
    """The address of this machine that leads to `host`. Raises OSError where nothing does."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])


def local_interface(host: str) -> str | None:
    """The network interface that leads to `host`; None where the system does not say."""
    address = local_address(host)
    if ":" in address or os.uname().sysname != "Linux":
        return None
    import fcntl

    wanted = socket.inet_aton(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # it has no such address
            if found[20:24] == wanted:
                return name
    return None


def rendezvous_store(address: str, size: int) -> Any:
    """The TCPStore over which `size` processes find each other, its server in this one, on a free port of `address`.

    By itself torch listens at every address of the machine, whatever it is given. Raises EngineError.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family)
    except OSError as error:
        raise EngineError(f"stages cannot meet at {address}: {reason_of(error)}") from error
    port = listener.getsockname()[1]
    made: Any = distributed
    # the store closes the descriptor
    return made.TCPStore(address, port, size, True, wait_for_workers=False, master_listen_fd=listener.detach())
