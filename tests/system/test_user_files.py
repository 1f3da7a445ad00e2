"""Files that a user names: what is none is refused at once, under every flag that reads one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ktransformers.cli.chat.history import ChatHistory
from ktransformers.cli.chat.input import read_prompt_file
from ktransformers.cli.parsing.settings import read_yaml
from ktransformers.config import EngineConfig
from ktransformers.convert.imatrix import read_imatrix
from ktransformers.engine.parallel.ranks.agent import read_secret
from ktransformers.engine.sequence.session_file import open_session
from ktransformers.errors import KTransformersError
from ktransformers.optimize.document import read_yaml as read_rules
from ktransformers.server.http.keys import read_api_keys
from ktransformers.system.user_files import WrongFileError, read_named, read_own

READERS: dict[str, Callable[[Path], object]] = {
    "--prompt_file": read_prompt_file,
    "--config, models.yaml": read_yaml,
    "--optimize_config_path": read_rules,
    "--api_key_file": lambda path: read_api_keys([], path),
    "--stage_key_file": read_secret,
    "--imatrix": read_imatrix,
    "/load of messages": lambda path: ChatHistory().load(path),
    "/load of a session": open_session,
    "--gguf_path": lambda path: EngineConfig(gguf_path=path).resolved(),
}


@contextmanager
def socket_at(path: Path) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
        yield


@pytest.mark.parametrize("kind", ["pipe", "socket", "folder", "device"])
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_refused_at_once(
    reader: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody writes to the pipe: whoever opens it as a file waits for ever."""
    monkeypatch.chdir(tmp_path)  # addresses of sockets are short
    path = Path("x")
    if reader == "--gguf_path" and kind == "folder":
        pytest.skip("a folder is welcome")
    if kind == "socket":
        with socket_at(path), pytest.raises(KTransformersError):
            READERS[reader](path)
        return
    if kind == "device":
        path.symlink_to("/dev/zero")  # which has no end
    else:
        {"pipe": os.mkfifo, "folder": os.mkdir}[kind](path)
    with pytest.raises(KTransformersError):
        READERS[reader](path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja", "model.safetensors"])
def test_a_pipe_in_a_models_folder_is_refused_by_name(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(KTransformersError, match=f"{name} cannot be read: it is a named pipe"):
        EngineConfig(model_path=tmp_path).resolved()


def test_pipes_of_a_shell_are_read() -> None:
    """What `--api_key_file <(pass show keys)` gives."""
    reading, writing = os.pipe()

    def write() -> None:
        with open(writing, "wb") as file:
            file.write(b"one\n")

    thread = threading.Thread(target=write)
    thread.start()
    try:
        assert list(read_api_keys([], Path(f"/dev/fd/{reading}"))) == ["one"]
    finally:
        thread.join()
        os.close(reading)


def test_files_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "key"
    path.write_bytes(b"abc")
    path.chmod(0o644)
    assert read_own(path) == read_named(path) == b"abc"
    assert read_named(path, 2) == b"ab"
    with pytest.raises(WrongFileError, match="others can read or change it"):
        read_own(path, is_secret=True)
    path.chmod(0o600)
    assert read_own(path, is_secret=True) == b"abc"
    (tmp_path / "link").symlink_to(path)
    assert read_named(tmp_path / "link") == b"abc"
    with pytest.raises(WrongFileError, match="it is a link"):
        read_own(tmp_path / "link")
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    with pytest.raises(WrongFileError, match="belongs to another user"):
        read_own(path)
