"""Finds whether the other side of a connection that sends no more still reads. Knows no HTTP.

A client that has left and one that only sends no more (`shutdown(SHUT_WR)`) look the same on the wire: both send a FIN.
Of a client on this machine the kernel knows which it is: a socket that its process has closed belongs to no file any
more. Of others it shows when they are sent something, or probed: the system of one that has left answers with a reset.
"""

from __future__ import annotations

import ipaddress
import socket
import struct

__all__ = ["has_reset", "probe_often", "reads_still"]

_NETLINK_SOCK_DIAG, _SOCK_DIAG_BY_FAMILY = 4, 20
_NLMSG_ERROR, _NLM_F_REQUEST = 2, 1
_ALL_STATES = 0xFFFFFFFF
_NO_COOKIE = b"\xff" * 8
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, pid
_ID = struct.Struct("=2s2s16s16sI8s")  # inet_diag_sockid: ports, addresses, interface, cookie
_ASK = struct.Struct("=BBBBI")  # inet_diag_req_v2 in front of its id: family, protocol, extensions, padding, states
_STATE_AT, _INODE_AT = 1, 4 + _ID.size + 4 * 4  # in inet_diag_msg
_CLOSED = 7  # TCP_CLOSE


def reads_still(connection: socket.socket) -> bool | None:
    """Whether the other side, of which a FIN has come, can read what is sent to it. None: it is on another machine.

    Also None where the kernel does not tell (another system than Linux, a sandbox). Does not wait.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        local, peer = connection.getsockname(), connection.getpeername()
    except OSError:  # it is reset
        return False
    if not ipaddress.ip_address(str(peer[0]).partition("%")[0]).is_loopback and peer[0] != local[0]:
        return None
    try:
        found = _socket_of(connection.family, peer, local)
    except OSError:
        return None
    return None if found is None else found != 0


def _socket_of(family: socket.AddressFamily, source: tuple[str, int], target: tuple[str, int]) -> int | None:
    """The inode of the socket of this machine that is `source` to `target`; 0 when no file is it any more.

    None: there is no such socket. Raises OSError.
    """
    mapped = str(source[0]).startswith("::ffff:") and "." in str(source[0])  # the other side may be of IPv4
    if mapped:
        source, target = (str(source[0])[7:], source[1]), (str(target[0])[7:], target[1])
        family = socket.AF_INET
    ports = struct.pack(">H", source[1]), struct.pack(">H", target[1])
    places = (socket.inet_pton(family, str(one[0]).partition("%")[0]).ljust(16, b"\0") for one in (source, target))
    body = _ASK.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES) + _ID.pack(*ports, *places, 0, _NO_COOKIE)
    header = _HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_SOCK_DIAG) as asking:
        asking.setblocking(False)  # the kernel answers before `send` returns
        asking.send(header + body)
        answer = asking.recv(4096)
    kind = _HEADER.unpack_from(answer)[1]
    if kind == _NLMSG_ERROR or len(answer) < _HEADER.size + _INODE_AT + 4:
        return None
    return int(struct.unpack_from("=I", answer, _HEADER.size + _INODE_AT)[0])


def probe_often(connection: socket.socket) -> None:
    """Have the kernel probe a silent peer each second: one that has left resets the connection, at the latest when its
    system has forgotten it, after a minute on Linux.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 30)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def has_reset(connection: socket.socket) -> bool:
    """Whether the connection is over in both directions, for who does not wait for what it receives."""
    if not hasattr(socket, "TCP_INFO"):
        return False
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _CLOSED
    except OSError:
        return True
