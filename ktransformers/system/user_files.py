"""Files and folders that a user names, or that this program keeps for its user, checked before they are opened.

Opening a named pipe waits for whoever writes to it, for ever. What a folder of ours holds is text of conversations or
a key: it must belong to this user, and to nobody else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path

from ktransformers.errors import ConfigError, reason_of

__all__ = [
    "WrongFileError",
    "check_own_folder",
    "file_kind",
    "open_named",
    "open_own",
    "read_named",
    "read_own",
    "replace_own",
]


class WrongFileError(OSError):
    """The error for a path where something is, but not what may be read here. strerror: what it is instead."""


_KINDS = (
    (stat.S_ISDIR, "it is a folder"),
    (stat.S_ISFIFO, "it is a named pipe"),
    (stat.S_ISSOCK, "it is a socket"),
    (stat.S_ISCHR, "it is a device"),
    (stat.S_ISBLK, "it is a device"),
    (stat.S_ISLNK, "it is a link"),
)


def check_own_folder(flag: str, path: Path, holds: str) -> None:
    """Make a folder that is its user's alone, or check that it is.

    flag: which names it, with its dashes. holds: what others must not read there, for the message. Raises ConfigError.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a NUL in it
        if isinstance(error, FileExistsError):
            raise ConfigError(f"{flag} {path} is no folder; name another one") from error
        raise ConfigError(f"{flag} {path} cannot be made: {reason_of(error)}; name another folder") from error
    if not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{flag} {path} is no folder; name another one")
    if found.st_uid != os.getuid():
        raise ConfigError(f"{flag} {path} belongs to another user; name a folder of your own")
    if found.st_mode & 0o077:
        raise ConfigError(f"{flag} {path} can be entered by others: {holds}; chmod 700 it")
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise ConfigError(f"{flag} {path} cannot be written to; mend it with chmod, or name another folder")


def file_kind(path: Path) -> str | None:
    """Return what is there instead of a file, in words; None for a file, and for nothing."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return _kind_of(mode)


def _kind_of(mode: int) -> str | None:
    return next((words for is_it, words in _KINDS if is_it(mode)), None)


def open_named(path: Path) -> int:
    """Open a file that the user names; return a descriptor for reading. Raises OSError for what is none, at once.

    A pipe that this process was given open, as by `<(...)` of a shell, is read like a file: /dev/stdin, /dev/fd/63.
    """
    kind = _kind_of(os.stat(path).st_mode)
    if kind == "it is a named pipe" and _is_open_already(path):
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    if kind is not None:
        raise WrongFileError(0, f"{kind}, not a file", str(path))
    return _checked(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), path)


def open_own(path: Path, is_secret: bool) -> int:
    """Open a file that this program has made for its user; return a descriptor for reading.

    Raises OSError for what is none.
    A link, and a file of another user, is none; is_secret: and neither is a file that others may read or write.
    """
    kind = _kind_of(os.lstat(path).st_mode)
    if kind is not None:  # a socket, which cannot be opened, among others
        raise WrongFileError(0, f"{kind}, not a file", str(path))
    fd = _checked(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), path)
    found = os.fstat(fd)
    why = None
    if found.st_uid != os.getuid():
        why = "it belongs to another user"
    elif is_secret and found.st_mode & 0o077:
        why = "others can read or change it"
    if why is not None:
        os.close(fd)
        raise WrongFileError(0, why, str(path))
    return fd


def read_named(path: Path, max_bytes: int = -1) -> bytes:
    """Return the bytes of a file that the user names, at most max_bytes of it. Raises OSError, see open_named."""
    with open(open_named(path), "rb") as file:
        return file.read(max_bytes)


def read_own(path: Path, is_secret: bool = False) -> bytes:
    """Return the bytes of a file that this program has made. Raises OSError, see open_own."""
    with open(open_own(path, is_secret), "rb") as file:
        return file.read()


def replace_own(path: Path, data: bytes) -> None:
    """Write a file that can be made again, in folders of the user's alone that are made where they are missing.

    Readers find what was there before or all of `data`. Raises OSError, and leaves nothing behind then.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = path.with_suffix(f".{secrets.token_hex(4)}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        new.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _checked(fd: int, path: Path) -> int:
    kind = _kind_of(os.fstat(fd).st_mode)
    if kind is not None:
        os.close(fd)
        raise WrongFileError(0, f"{kind}, not a file", str(path))
    return fd


def _is_open_already(path: Path) -> bool:
    """Whether it is a name of a descriptor, whose pipe has no name of its own."""
    return "pipe:[" in os.path.realpath(path)
