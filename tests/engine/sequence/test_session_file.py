"""The file of a session: what is written is read, and whatever is wrong with it is refused with the reason."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ktransformers.core import SamplingParams
from ktransformers.engine.model.fingerprint import ModelIdentity
from ktransformers.engine.sequence import session_file
from ktransformers.engine.sequence.session_file import SessionFile, SessionHeader, open_session, write_session
from ktransformers.errors import SessionFileError

MODEL = ModelIdentity(
    description="a model", types=("Q4_K",), config="a", tensors="b", data="c", arithmetic={"the cache": "fp32"}
)
PARAMS = SamplingParams(
    temperature=0.7,
    seed=2**63 - 1,
    logit_bias={3: 1.5},
    stop=["\n\n", "é"],  # type: ignore[arg-type]
    max_tokens=9,
    frequency_penalty=0.25,
    constraint={"json": {"type": "object"}},  # type: ignore[arg-type]
)
MESSAGES = [{"role": "user", "content": 'é "quoted"\n\x01 and 中文'}, {"role": "assistant", "content": ""}]
IDS = (5, 0, 159, 7)
HEADER = SessionHeader(model=MODEL, cached_len=3, prompt_len=2, params=PARAMS, state_lens=(2, 3), messages=MESSAGES)
TENSORS = {
    "0.keys": torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "0.codes": torch.arange(15, dtype=torch.int8).reshape(3, 5),
    "state.2.1.conv": torch.randn(3, 7),
    "state.3.1.conv": torch.randn(3, 7),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "s.safetensors"
    write_session(path, HEADER, IDS, TENSORS)
    return path


def test_what_is_written_is_read(saved: Path) -> None:
    file = open_session(saved)
    assert file.header == HEADER
    assert file.token_ids == IDS
    assert file.nbytes == saved.stat().st_size
    assert file.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert file.tensors[name].dtype is tensor.dtype
        assert torch.equal(file.tensors[name], tensor)


def test_other_programs_can_read_it(saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        assert file.get_tensor("token_ids").tolist() == list(IDS)
        assert json.loads(file.metadata()["session"])["messages"] == MESSAGES


def test_it_is_its_owners_alone_and_a_link_stays_one(saved: Path, tmp_path: Path) -> None:
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    saved.chmod(0o644)
    link = tmp_path / "link"
    link.symlink_to(saved)
    write_session(link, HEADER, IDS[:3], TENSORS)
    assert link.is_symlink()
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
    assert open_session(saved).token_ids == IDS[:3]
    assert sorted(os.listdir(tmp_path)) == ["link", "s.safetensors"]


def test_any_flipped_bit_is_found(saved: Path, tmp_path: Path, random_cases: Callable[[int, int], int]) -> None:
    good, bad = saved.read_bytes(), tmp_path / "bad.safetensors"
    rng = random.Random(5)
    for _ in range(random_cases(100, 20000)):
        at, bit = rng.randrange(len(good)), rng.randrange(8)
        bad.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        with pytest.raises(SessionFileError):
            open_session(bad)


def test_any_truncation_is_found(saved: Path, tmp_path: Path) -> None:
    good, bad = saved.read_bytes(), tmp_path / "bad.safetensors"
    rng = random.Random(6)
    for length in (0, 1, 7, 8, 9, len(good) - 1, *(rng.randrange(len(good)) for _ in range(60))):
        bad.write_bytes(good[:length])
        with pytest.raises(SessionFileError, match="damaged or truncated"):
            open_session(bad)
    bad.write_bytes(good + b"\0")
    with pytest.raises(SessionFileError):
        open_session(bad)


def test_what_is_no_session(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text").write_text("[]")
    save_file({"a": torch.zeros(2)}, tmp_path / "weights")
    reasons = {
        "": "not a regular file",
        "pipe": "not a regular file",
        "text": "damaged or truncated",
        "none": "No such file",
        "text/none": "Not a directory",
        "weights": "it holds no session",
    }
    for name, reason in reasons.items():
        with pytest.raises(SessionFileError, match=reason):
            open_session(tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is readable for root")
def test_what_may_not_be_read(saved: Path) -> None:
    saved.chmod(0)
    with pytest.raises(SessionFileError, match="Permission denied"):
        open_session(saved)


def forged(path: Path, tensors: dict[str, torch.Tensor], **changes: str) -> None:
    """A file with a right checksum."""
    metadata = {"format": session_file.FORMAT, "version": session_file.VERSION, **changes}
    metadata["checksum"] = session_file._checksum(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": "2"}, "it has version '2'; this program reads 1"),
        ({"session": "{}"}, "its header is not understood"),
        ({"session": "[" * 100000}, "its header is not understood"),
        ({"cached_len": 5}, "contradict"),
        ({"cached_len": -1}, "contradict"),
        ({"prompt_len": 5}, "contradict"),
        ({"state_lens": [4]}, "states behind tokens"),
        ({"state_lens": [2, 2]}, "states behind tokens"),
        ({"params": {"temperature": -1.0}}, "its header is not understood"),
        ({"later": 1}, "its header is not understood"),
        ({"ids": torch.zeros(4)}, "no token ids"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, "no token ids"),
    ],
    ids=str,
)
def test_right_checksums_of_wrong_contents(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    path = tmp_path / "forged.safetensors"
    values = msgspec.to_builtins(HEADER) | {k: v for k, v in changes.items() if k not in ("version", "session", "ids")}
    outer = {"session": json.dumps(values)} | {k: v for k, v in changes.items() if k in ("version", "session")}
    ids = changes.get("ids", torch.tensor(IDS, dtype=torch.int32))
    forged(path, TENSORS | {"token_ids": ids}, **outer)
    with pytest.raises(SessionFileError, match=reason):
        open_session(path)


def layout(**changes: Any) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    return {
        "0.keys": (torch.bfloat16, (2, 4)),
        "0.codes": (torch.int8, (5,)),
        "state 1.conv": (torch.float32, (3, 7)),
    } | changes


def test_tensors_must_be_those_of_the_cache(saved: Path) -> None:
    file = open_session(saved)
    file.check_tensors(layout())
    for changes in (
        {"0.keys": (torch.float32, (2, 4))},
        {"0.keys": (torch.bfloat16, (4, 2))},
        {"0.values": (torch.bfloat16, (2, 4))},
        {"state 1.conv": (torch.float32, (7, 3))},
        {"state 1.recurrent": (torch.float32, (3, 7))},
    ):
        with pytest.raises(SessionFileError, match="is not what this model keeps"):
            file.check_tensors(layout(**changes))
    fewer = SessionFile(file.path, file.header, file.token_ids, {}, 0)
    with pytest.raises(SessionFileError, match=r"0\.codes"):
        fewer.check_tensors(layout())


# Where nothing can be written.


def test_what_was_there_stays_when_the_disk_is_full(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()
    usage = shutil.disk_usage(saved.parent)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(SessionFileError, match=r"it takes 6\d\.\d\d KiB, and 1000 B of the disk are free"):
            write_session(saved, HEADER, IDS[:2], TENSORS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))  # writing more fails, half-way
    try:
        with pytest.raises(SessionFileError, match="cannot save the session"):
            write_session(saved, HEADER, IDS[:2], TENSORS | {"more": torch.zeros(100000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_an_interrupt_leaves_nothing_behind(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = saved.read_bytes()

    def interrupt(file: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_session(saved, HEADER, IDS[:2], TENSORS)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_places_where_no_file_can_be(saved: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "", "missing/s.safetensors", "s.safetensors/s.safetensors"):
        with pytest.raises(SessionFileError, match="cannot save the session to "):
            write_session(tmp_path / name, HEADER, IDS, TENSORS)
    assert sorted(os.listdir(tmp_path)) == ["pipe", "s.safetensors"]
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
