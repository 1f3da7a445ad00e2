"""What is said between a program and the child process that reads its pictures. msgpack in frames, never pickle."""

from __future__ import annotations

import msgspec

__all__ = ["Answer", "Fault", "ProcessorOpened", "Question", "Read", "Setup"]


class Setup(msgspec.Struct, frozen=True):
    """The first question. folder: of the model's processor. store: where files of pictures go. tower: goes into the
    digests of pictures, see ChildReader."""

    folder: str
    store: str
    tower: bytes = b""


class Question(msgspec.Struct, frozen=True):
    """A picture to be read. data: as it was sent. detail: of limits.DETAILS."""

    data: bytes
    detail: str


class ProcessorOpened(msgspec.Struct, frozen=True, tag=True):
    """The answer to Setup, see PictureReader. notes: lines for the log, here and below."""

    placeholder: str
    position_token_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


class Read(msgspec.Struct, frozen=True, tag=True):
    """A picture that was read, see ReadPicture. nbytes: of its file, which is in the store now."""

    digest: bytes
    text: str
    num_positions: int
    width: int
    height: int
    nbytes: int
    notes: tuple[str, ...] = ()
    lead: int = 0
    trail: int = 0
    closing: str = ""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Why a question has no other answer, for whoever sent the picture."""

    message: str


Answer = ProcessorOpened | Read | Fault
