"""Makes local files of the headers of remote weight files: enough for a plan, at some megabytes instead of gigabytes.

What is made has the size of the real file and no bytes but the header's: a hole in the file system.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from huggingface_hub import constants
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from ktransformers.errors import FormatError
from ktransformers.hub.remote import HubError, RemoteFile, Repository, hub_errors
from ktransformers.hub.variants import Variant

__all__ = ["fetch_headers"]

FIRST_READ = 1 << 20
GROWTH = 4  # a vocabulary of 150,000 tokens makes a header of some 10 MB: three requests
MAX_HEADER = 256 << 20


def fetch_headers(repository: Repository, variant: Variant, folder: Path) -> Path:
    """Make the variant's files in `folder`, weights by their header alone, and return what to plan: file or folder. Of
    a GGUF nothing beside it is made.

    Raises HubError, and FormatError for what is no weight file.
    """
    with hub_errors(repository.name):
        for path in () if variant.is_gguf else variant.side:  # a GGUF's are large, and no plan without them needs them
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            file = repository.files[path]
            (folder / path).write_bytes(_read(file, 0, file.size))
        made = [_fetch_header(repository.files[path], folder / PurePosixPath(path).name) for path in variant.weights]
    return made[0] if variant.is_gguf else folder


def _fetch_header(file: RemoteFile, path: Path) -> Path:
    with path.open("wb") as out:
        out.truncate(file.size)
    read, wanted = 0, FIRST_READ
    while True:
        wanted = min(wanted, file.size)
        with path.open("r+b") as out:
            out.seek(read)
            out.write(_read(file, read, wanted))
        read = wanted
        error = _error_of(path, read)
        if error is None:
            return path
        if read == file.size or read >= MAX_HEADER or not _may_begin_like(path):
            raise error
        wanted = read * GROWTH


def _may_begin_like(path: Path) -> bool:
    with path.open("rb") as file:
        return path.suffix.lower() != ".gguf" or file.read(4) == b"GGUF"


def _error_of(path: Path, read: int) -> FormatError | None:
    """None when the file's first `read` bytes have the whole header. What follows them are zeros."""
    from ktransformers.weights.gguf.file import parse_file as parse_gguf
    from ktransformers.weights.safetensors.file import parse_file as parse_safetensors

    parse = parse_gguf if path.suffix.lower() == ".gguf" else parse_safetensors
    try:
        tensors = parse(path).tensors
    except FormatError as error:
        return error
    # A header that was read on into the zeros ends, and its tensors begin, behind what was read.
    begin = min((tensor.offset for tensor in tensors.values()), default=path.stat().st_size)
    return None if begin <= max(read, 1) or read == path.stat().st_size else FormatError(f"{path}: no whole header")


def _read(file: RemoteFile, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of a remote file. Raises HubError for a server that knows no ranges."""
    if begin >= end:
        return b""
    headers = build_hf_headers() | {"Accept-Encoding": "identity", "Range": f"bytes={begin}-{end - 1}"}
    with get_session().stream("GET", file.url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
        if response.is_error:
            response.read()
        hf_raise_for_status(response)
        if response.status_code != 206 and (begin, end) != (0, file.size):
            raise HubError(f"{constants.ENDPOINT} cannot send a part of {file.path}, so nothing can be planned")
        data = response.read()
    if len(data) != end - begin:
        raise HubError(f"{file.path}: the hub sent {len(data)} bytes instead of {end - begin}")
    return data
