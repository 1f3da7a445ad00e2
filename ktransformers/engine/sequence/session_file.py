"""A session as one safetensors file: what was said, in token ids, and what the model kept of it. Knows no model.

    __metadata__      "format", "version", "session": a SessionHeader as JSON, "checksum": sha256 of all else
    token_ids         int32 [N], prompt and answer
    3.keys, ...       [cached_len, ...] by position: what PagedCache.tensors() names, whatever page or slot it was in
    state.128.0.conv  [...] of recurrent layers: the state behind so many tokens, by StateCache.tensors()' names

A file is hostile until proven otherwise: everything is checked, the checksum too, before anything is used. It is
written beside its place, made to last, and then put there, so that there is a whole file or none.
"""

from __future__ import annotations

import hashlib
import logging
import math
import mmap
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ktransformers.core import SamplingParams, format_bytes
from ktransformers.engine.model.fingerprint import ModelIdentity
from ktransformers.errors import SessionFileError, reason_of
from ktransformers.media.records import MediaItem

__all__ = ["SUFFIX", "SessionFile", "SessionHeader", "mapped_tensors", "open_session", "state_name", "write_session"]

logger = logging.getLogger(__name__)

SUFFIX = ".safetensors"
FORMAT, VERSION = "ktransformers session", "1"

_IDS = "token_ids"
_ALIGN = 64
_MARGIN = 1 << 16  # of a file beside its tensors and its header's own JSON


class SessionHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The header of a session file: what it says beside its tensors.

    cached_len: of how many leading tokens keys and values are in the file. prompt_len: how many of the tokens were the
    prompt of the last answer, whose parameters are params, the seed set; all of them and None without an answer.
    state_lens: behind how many tokens there are states of recurrent layers. messages: the conversation, where there is
    one. media: the prompt's pictures, which are not in the file but in the messages, where there are any.
    """

    model: ModelIdentity
    cached_len: int
    prompt_len: int
    params: SamplingParams | None = None
    state_lens: tuple[int, ...] = ()
    messages: list[dict[str, Any]] | None = None
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionFile:
    """A session's file that was checked. tensors: those of the cache and the states by their names here, mapped."""

    path: Path
    header: SessionHeader
    token_ids: tuple[int, ...]
    tensors: Mapping[str, torch.Tensor]
    nbytes: int

    def fail(self, why: str) -> SessionFileError:
        """Make the error for a file that cannot be used."""
        return _failure(self.path, why)

    def check_tensors(self, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Raise SessionFileError unless `tensors` are those of a cache that keeps these names.

        layout: type and shape of what is kept of a position; "state NAME": of a sequence.
        """
        header, wanted = self.header, dict[str, tuple[torch.dtype, tuple[int, ...]]]()
        for name, (dtype, shape) in layout.items():
            if name.startswith("state "):
                state = name.removeprefix("state ")
                wanted |= {state_name(length, state): (dtype, shape) for length in header.state_lens}
            elif header.cached_len:
                wanted[name] = dtype, (header.cached_len, *shape)
        found = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()}
        if found != wanted:
            odd = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
            raise self.fail(f"its tensor {odd[0]!r} is not what this model keeps")


def state_name(length: int, name: str) -> str:
    """Return the name of a state's tensor behind `length` tokens."""
    return f"state.{length}.{name}"


def _failure(path: Path, why: str) -> SessionFileError:
    return SessionFileError(f"the session in {path} cannot be used: {why}")


# Writing.


def write_session(
    path: Path, header: SessionHeader, token_ids: Sequence[int], tensors: Mapping[str, torch.Tensor]
) -> int:
    """Write a session, whole or not at all, readable by its owner alone. Returns the file's bytes.

    tensors: on the CPU. Raises SessionFileError when it cannot be written; what was at `path` is still there then.
    """
    text = msgspec.json.encode(header).decode()
    whole = {_IDS: torch.tensor(list(token_ids), dtype=torch.int32)}
    whole |= {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata = {"format": FORMAT, "version": VERSION, "session": text}
    metadata["checksum"] = _checksum(metadata, whole)
    target = Path(os.path.realpath(path))  # a link stays one
    try:
        if target.exists() and not target.is_file():  # replacing would remove a device or a pipe
            raise OSError(0, "it is not a regular file")
        nbytes = sum(tensor.nbytes for tensor in whole.values()) + len(text) + _MARGIN
        free = shutil.disk_usage(target.parent).free
        if free < nbytes:
            raise OSError(0, f"it takes {format_bytes(nbytes)}, and {format_bytes(free)} of the disk are free")
        logger.info("writing a session of %d tokens, %s, to %s", len(token_ids), format_bytes(nbytes), path)
        return _replace(target, whole, metadata)
    except (OSError, SafetensorError) as error:
        raise _unsaved(path, error) from error


def mapped_tensors(
    path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], num_tokens: int
) -> dict[str, torch.Tensor]:
    """Make room for what a session at `path` will keep of num_tokens, [num_tokens, ...] each by `layout`'s types and
    shapes.

    Beside `path` in a file without a name, so that the system may write out what does not fit in memory; gone with the
    last tensor. Raises SessionFileError.
    """
    offsets, at = dict[str, int](), 0
    for name, (dtype, shape) in layout.items():
        offsets[name] = at
        at += -(-num_tokens * math.prod(shape) * dtype.itemsize // _ALIGN) * _ALIGN
    try:
        with tempfile.TemporaryFile(dir=Path(os.path.realpath(path)).parent) as file:  # mode 0600
            os.posix_fallocate(file.fileno(), 0, max(at, 1))  # a full disk is an error here, not a signal later
            block = torch.frombuffer(mmap.mmap(file.fileno(), max(at, 1)), dtype=torch.uint8)
    except OSError as error:
        raise _unsaved(path, error) from error
    found = {}
    for name, (dtype, shape) in layout.items():
        nbytes = num_tokens * math.prod(shape) * dtype.itemsize
        found[name] = block[offsets[name] :][:nbytes].view(dtype).view(num_tokens, *shape)
    return found


def _unsaved(path: Path, error: Exception) -> SessionFileError:
    return SessionFileError(f"cannot save the session to {path}: {reason_of(error)}")


def _replace(target: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> int:
    """Write beside `target`, then put it there. A file that is not finished is removed."""
    file, name = tempfile.mkstemp(prefix=f".{target.name[:100]}.", suffix=".new", dir=target.parent)  # mode 0600
    try:
        save_file(tensors, name, metadata)
        nbytes = os.stat(name).st_size
        os.chmod(name, 0o600)
        os.fsync(file)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    finally:
        os.close(file)
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    return nbytes


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, torch.Tensor]) -> str:
    """sha256 of metadata and tensors, each piece with its name and length."""
    made = hashlib.sha256()

    def add(data: bytes) -> None:
        made.update(len(data).to_bytes(8, "little"))
        made.update(data)

    for key, value in sorted(metadata.items()):
        if key != "checksum":
            add(key.encode())
            add(value.encode())
    for name, tensor in sorted(tensors.items()):
        add(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        made.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


# Reading.


def open_session(path: Path) -> SessionFile:
    """Read a session's file and check all of it. Raises SessionFileError."""
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):  # a pipe would be waited for
            raise _failure(path, "it is not a regular file")
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise _failure(path, reason_of(error)) from error
    except (SafetensorError, RuntimeError, ValueError, LookupError) as error:
        raise _failure(path, f"it is damaged or truncated ({reason_of(error)})") from error
    if metadata.get("format") != FORMAT:
        raise _failure(path, "it holds no session; /save and save_session write some")
    if metadata.get("version") != VERSION:
        raise _failure(path, f"it has version {metadata.get('version', 'none')!r:.20}; this program reads {VERSION}")
    if metadata.get("checksum") != _checksum(metadata, tensors):
        raise _failure(path, "its checksum is wrong: it was damaged, or changed by hand")
    try:
        header = msgspec.json.decode(metadata["session"], type=SessionHeader)
    except (KeyError, ValueError, RecursionError) as error:  # of msgspec too
        raise _failure(path, f"its header is not understood ({reason_of(error)})") from error
    return _checked(path, header, tensors, status.st_size)


def _checked(path: Path, header: SessionHeader, tensors: dict[str, torch.Tensor], nbytes: int) -> SessionFile:
    ids = tensors.pop(_IDS, None)
    if ids is None or ids.dtype is not torch.int32 or ids.dim() != 1:
        raise _failure(path, "it has no token ids")
    count, lens = len(ids), header.state_lens
    if not 0 <= header.cached_len <= count or not 0 <= header.prompt_len <= count:
        raise _failure(path, "its lengths contradict each other")
    if any(not 0 < length <= header.cached_len for length in lens) or len(set(lens)) < len(lens):
        raise _failure(path, "it has states behind tokens that are not in it")
    return SessionFile(path, header, tuple(ids.tolist()), tensors, nbytes)
