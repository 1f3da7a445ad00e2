"""Recognizes by its first bytes what a file is that should be a model's, and says it in one line. Parses no format."""

from __future__ import annotations

import re
import struct
from collections import Counter
from pathlib import Path

from ktransformers.errors import FormatError, reason_of

__all__ = [
    "MTP_PREFIX",
    "check_is_file",
    "drafter_rank",
    "incomplete",
    "is_drafter",
    "is_gguf",
    "is_projector",
    "is_safetensors",
    "list_folder",
    "not_weights",
    "projector_rank",
    "read_head",
    "size_of",
    "why_not_json",
    "without_weights",
    "wrong_start",
]

HEAD_BYTES = 512
_SHOWN_BYTES = 24
_LFS = b"version https://git-lfs.github.com"
_NOT_READ = "is not read; convert the model to safetensors or GGUF, or download it in one of these"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
_ARCHIVES = {
    b"PK\x03\x04": "zip",
    b"\x1f\x8b": "gzip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"7z\xbc\xaf": "7z",
    b"Rar!": "rar",
}
MTP_PREFIX = "mtp-"
"""What names of files begin with that hold a model's layers for multi-token prediction, or an assistant."""
_DRAFTERS = (MTP_PREFIX, "dspark-", "dflash-", "eagle3-")
_BITS = re.compile(r"(?<![A-Za-z0-9])(?:I?Q|BF|FP?|MXFP|NVFP)(\d{1,2})(?![0-9])", re.IGNORECASE)
_OLD_GGML = (b"lmgg", b"fmgg", b"tjgg", b"algg")


def size_of(nbytes: int) -> str:
    """Return a number of bytes for messages: "4.9 GiB", "17 bytes"."""
    if nbytes >= 1 << 60:
        return "more than 1 EiB"
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} byte{'s' * (nbytes != 1)}"


def check_is_file(path: Path) -> None:
    """Raise FormatError for something that is no file: opening a pipe would wait for ever, a device has no end."""
    try:
        if path.exists() and not path.is_file():
            raise FormatError(f"{path} is not a file" if path.is_dir() else f"{path} is a device or a pipe, not a file")
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {reason_of(error)}") from error


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, at most HEAD_BYTES. Raises FormatError."""
    check_is_file(path)
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except OSError as error:
        raise FormatError(f"{path} cannot be read: {reason_of(error)}") from error


def is_gguf(head: bytes) -> bool:
    """Whether a file begins as GGUF does."""
    return head[:4] == b"GGUF"


def is_safetensors(head: bytes) -> bool:
    """Whether a file may be safetensors: a length below 2^32, then a JSON object."""
    return len(head) > 8 and struct.unpack("<Q", head[:8])[0] < 1 << 32 and head[8:9] == b"{"


def wrong_start(head: bytes) -> str | None:
    """Return what a file that begins so is ("is an HTML page: ..."), if people meet it in place of weights."""
    if is_safetensors(head):  # whose first byte, of a length, may be any
        return None
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if not head:
        return "is empty; download or convert it again"
    if head.startswith(_LFS):
        return "is a Git LFS pointer: the file itself was not downloaded; run `git lfs pull` in its folder"
    if text.startswith((b"<!doctype html", b"<html")):
        return "is an HTML page: the download failed; download it again"
    if text.startswith(b"<?xml"):
        return "is an XML page: the download failed; download it again"
    if head[:4] in _OLD_GGML:
        return "is a GGML file from before GGUF; convert the model again"
    if (head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05")) or (
        head[:4] == b"PK\x03\x04" and b"data.pkl" in head
    ):
        return f"is a PyTorch pickle, which {_NOT_READ}"
    kind = next((name for magic, name in _ARCHIVES.items() if head.startswith(magic)), None)
    if kind is not None:
        return f"is a {kind} archive; unpack it and pass what it holds"
    if head[257:262] == b"ustar":
        return "is a tar archive; unpack it and pass what it holds"
    if len(head) >= 64 and not any(head):
        return "begins with zeros: its download did not finish; download it again"
    return None


def not_weights(path: Path, head: bytes, wanted: str) -> FormatError:
    """Return the error for a file that begins with `head` and should be `wanted` ("GGUF", "safetensors")."""
    known = wrong_start(head)
    if known is not None:
        return FormatError(f"{path} {known}")
    other, is_other = ("GGUF", is_gguf) if wanted == "safetensors" else ("safetensors", is_safetensors)
    if is_other(head):
        suffix = f".{other.lower()}"
        if path.suffix == suffix:
            return FormatError(f"{path} is a {other} file, and a {wanted} file is wanted here")
        return FormatError(f"{path} is a {other} file with another file's name; rename it to end in {suffix}")
    return FormatError(f"{path} is not a {wanted} file: it begins with {_shown(head)}")


def incomplete(path: Path, size: int, needed: int, last: str) -> FormatError:
    """Return the error for a file of `size` bytes whose header promises `needed`.

    last: the tensor that ends there, quoted.
    """
    return FormatError(
        f"{path}: the file is truncated or damaged: {size_of(needed - size)} missing of the {size_of(needed)} that its "
        f"tensors take, up to {last}; download or convert it again"
    )


def why_not_json(data: bytes, error: Exception) -> str:
    """Return what is wrong with a file whose bytes are `data`, which a JSON parser refused with `error`."""
    known = wrong_start(data[:HEAD_BYTES])
    return known or f"cannot be read as JSON: {reason_of(error)}; copy it again from the original model"


def _shown(head: bytes) -> str:
    start = head[:_SHOWN_BYTES]
    try:
        text = start.decode("utf-8", "strict" if len(head) <= _SHOWN_BYTES else "ignore")
    except UnicodeDecodeError:
        text = ""
    if text and all(character.isprintable() or character in "\r\n\t" for character in text):
        return ascii(text) + ("..." if len(head) > _SHOWN_BYTES else "")
    return f"the bytes {start[:8].hex(' ')}"


def list_folder(folder: Path) -> list[Path]:
    """Return the entries of a folder, in order. Raises FormatError when it cannot be read."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise FormatError(f"the folder {folder} cannot be read: {reason_of(error)}") from error


def without_weights(folder: Path) -> FormatError:
    """Return the error for a folder with neither .gguf nor .safetensors, which says what it holds instead."""
    entries = list_folder(folder)
    below = [e for entry in entries if entry.is_dir() for e in _weights_in(entry)]
    pickles = [entry.name for entry in entries if entry.suffix in _PICKLE_SUFFIXES]
    if below:
        return FormatError(f"{folder} holds no weights, but {below[0].relative_to(folder)} does; pass that one's path")
    if pickles:
        return FormatError(f"{folder} holds a PyTorch pickle ({pickles[0]}), which {_NOT_READ}")
    if not entries:
        return FormatError(f"{folder} is an empty folder; a model is a GGUF file or a folder with safetensors")
    kinds = Counter(entry.suffix or entry.name for entry in entries)
    found = ", ".join(f"{count} {kind}" if count > 1 else kind for kind, count in kinds.most_common(5))
    names = ", ".join(entry.name for entry in entries) if len(entries) <= 4 else f"{len(entries)} entries: {found}"
    return FormatError(f"{folder} holds neither .gguf nor .safetensors files, only {names[:200]}")


def _weights_in(folder: Path) -> list[Path]:
    try:
        return [e for e in sorted(folder.iterdir()) if e.suffix in (".gguf", ".safetensors")]
    except OSError:
        return []


def is_projector(name: str) -> bool:
    """Whether a GGUF file is a projector for pictures by its name, as llama.cpp finds it."""
    return "mmproj" in name.lower()


def is_drafter(name: str) -> bool:
    """Whether a GGUF file drafts for the model beside it by its name, as llama.cpp finds it."""
    return name.startswith(_DRAFTERS)


def projector_rank(name: str) -> tuple[int, str]:
    """Return a key by which the file of several projectors of a model comes first that is taken: towers are published
    in 16 bits."""
    words = re.split(r"[-.]", name.upper().replace("_", "-"))
    types = ("BF16", "F16", "F32")
    return next((place for place, one in enumerate(types) if one in words), len(types)), name


def drafter_rank(name: str, model: str) -> tuple[int, str]:
    """Return a key by which the file of several that draft for a model comes first that is taken: the one that is
    closest to the model's in bits. model: its file's name."""
    mine, theirs = ([int(bits) for bits in _BITS.findall(one)] or [0] for one in (name, model))
    return abs(mine[-1] - theirs[-1]), name
