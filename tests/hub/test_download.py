"""Downloads from a hub on loopback: whole, resumed, broken, refused."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download, scan_cache_dir

from ktransformers.errors import CapacityError, ConflictError, FormatError
from ktransformers.hub import download
from ktransformers.hub.download import CHUNK, MAX_RETRIES, Downloader
from ktransformers.hub.names import parse_name
from ktransformers.hub.remote import HubError, list_repository
from tests.support.servers.hub_server import HubServer

FILE = "model-Q8_0.gguf"


def downloader(name: str = "org/model-GGUF", sleep: Callable[[float], None] = lambda seconds: None) -> Downloader:
    return Downloader(list_repository(parse_name(name)), sleep)


def test_files_come_whole_into_the_cache_that_other_programs_read(hub: HubServer, tmp_path: Path) -> None:
    came: list[int] = []
    brought = downloader()
    paths = [FILE, "README.md", "Q4_K_M/model-Q4_K_M-00001-of-00002.gguf"]
    for path in paths:
        place = brought.fetch(path, came.append)
        assert place.read_bytes() == hub.repos["org/model-GGUF"].files[path]
    brought.finish()
    assert sum(came) == sum(len(hub.repos["org/model-GGUF"].files[path]) for path in paths)
    assert max(came) <= CHUNK
    # huggingface_hub itself finds them, with no byte asked for again
    hub.requests.clear()
    for path in paths:
        assert hf_hub_download("org/model-GGUF", path) == str(brought.snapshot / path)
    assert not any(request.sent for request in hub.requests)
    info = scan_cache_dir(tmp_path / "cache")
    assert not info.warnings
    assert [sorted(revision.refs) for repo in info.repos for revision in repo.revisions] == [["main"]]
    # and once there, nothing is requested
    hub.requests.clear()
    brought.fetch(FILE, came.append)
    assert not hub.requests


def test_a_stopped_download_goes_on_where_it_was(hub: HubServer) -> None:
    data = hub.repos["org/model-GGUF"].files[FILE]
    came = 0

    def stop_at_half(nbytes: int) -> None:
        nonlocal came
        came += nbytes
        if came >= len(data) // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        downloader().fetch(FILE, stop_at_half)
    again = downloader()
    assert again.bytes_here([FILE]) == came
    assert 0 < came < len(data)
    assert not (again.snapshot / FILE).exists()
    hub.requests.clear()
    later: list[int] = []
    assert again.fetch(FILE, later.append).read_bytes() == data
    (body,) = hub.bodies(FILE)
    assert (body.range, body.sent) == (f"bytes={came}-", len(data) - came)
    assert sum(later) == len(data) - came


def test_a_connection_that_breaks_is_tried_again(hub: HubServer) -> None:
    data = hub.repos["org/model-GGUF"].files[FILE]
    waits: list[float] = []
    hub.cut_after = [CHUNK + 7, CHUNK]
    assert downloader(sleep=waits.append).fetch(FILE, lambda nbytes: None).read_bytes() == data
    bodies = hub.bodies(FILE)
    assert [body.sent for body in bodies[:2]] == [CHUNK + 7, CHUNK]
    assert len(waits) == 2
    # what came of a chunk that was not whole may have to come again, and nothing else
    begins = [int((body.range or "").removeprefix("bytes=").rstrip("-")) for body in bodies]
    assert begins[0] == 0
    assert CHUNK <= begins[1] <= CHUNK + 7


def test_a_connection_that_always_breaks_is_given_up_and_what_came_is_kept(hub: HubServer) -> None:
    hub.cut_after = [CHUNK + 7] + [0] * 100
    waits: list[float] = []
    given_up = downloader(sleep=waits.append)
    with pytest.raises(HubError, match="cannot be reached"):
        given_up.fetch(FILE, lambda nbytes: None)
    assert len(waits) == MAX_RETRIES + 1  # the first attempt brought something
    assert given_up.bytes_here([FILE]) >= CHUNK


def test_a_busy_hub_is_asked_again(hub: HubServer) -> None:
    waits: list[float] = []
    hub.failures = [503, 429]
    brought = downloader(sleep=waits.append)
    assert brought.fetch(FILE, lambda nbytes: None).read_bytes() == hub.repos["org/model-GGUF"].files[FILE]
    assert waits == [2, 4]
    hub.failures = [410]
    with pytest.raises(HubError, match="answers 410 for org/model-GGUF"):
        brought.fetch("Q4_K_M/model-Q4_K_M-00001-of-00002.gguf", lambda nbytes: None)


def test_a_server_without_ranges_sends_it_all_again(hub: HubServer) -> None:
    data = hub.repos["org/model-GGUF"].files[FILE]
    hub.cut_after = [2 * CHUNK]
    hub.has_ranges = False
    came: list[int] = []
    assert downloader().fetch(FILE, came.append).read_bytes() == data
    assert sum(came) == len(data)


@pytest.mark.parametrize("path", [FILE, "README.md"])  # SHA-256 of LFS, and git's SHA-1
def test_wrong_bytes_are_deleted(hub: HubServer, path: str) -> None:
    hub.corrupt.add(path)
    came: list[int] = []
    brought = downloader()
    with pytest.raises(FormatError, match=f"{path}: .* checksum .* were deleted"):
        brought.fetch(path, came.append)
    assert sum(came) == brought.bytes_here([path]) == 0
    assert list((brought.folder / "blobs").iterdir()) == []
    hub.corrupt.clear()
    assert brought.fetch(path, came.append).read_bytes() == hub.repos["org/model-GGUF"].files[path]


def test_a_damaged_beginning_is_found_after_it_was_resumed(hub: HubServer) -> None:
    brought = downloader()
    blob = brought.folder / "blobs" / hub.repos["org/model-GGUF"].etag(FILE)
    blob.parent.mkdir(parents=True)
    blob.with_name(f"{blob.name}.incomplete").write_bytes(b"not what the hub has")
    with pytest.raises(FormatError, match="checksum"):
        brought.fetch(FILE, lambda nbytes: None)


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", hub.TOKEN)
    downloader("org/private").fetch(FILE, lambda nbytes: None)
    assert {request.authorization for request in hub.requests if not request.is_storage} == {f"Bearer {hub.TOKEN}"}
    assert {request.authorization for request in hub.requests if request.is_storage} == {None}


def test_what_the_hub_refuses_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HubError, match=r"^org/gated is gated: accept its terms at http\S+/org/gated, .*HF_TOKEN$"):
        downloader("org/gated").fetch(FILE, lambda nbytes: None)
    for name in ("org/private", "org/nothing"):
        with pytest.raises(HubError, match=rf"^there is no model http\S+/{name}, or it is private: .*$"):
            downloader(name)
    with pytest.raises(HubError, match="has no branch, tag or commit v9"):
        downloader("org/model-GGUF@v9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        downloader()


def test_a_hub_that_is_not_there_is_one_line(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"^http://127.0.0.1:9 cannot be reached \(.*\); check the network.*$"):
        downloader()


def test_a_hostile_listing_writes_nothing_elsewhere(hub: HubServer) -> None:
    hub.repos["org/model"].files["../../evil.safetensors"] = b"x"
    with pytest.raises(HubError, match="no path inside"):
        downloader("org/model")


def test_two_processes_do_not_write_one_file(hub: HubServer) -> None:
    brought = downloader()
    partial = brought.folder / "blobs" / f"{hub.repos['org/model-GGUF'].etag(FILE)}.incomplete"
    partial.parent.mkdir(parents=True)
    with partial.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match="another process is downloading"):
            brought.fetch(FILE, lambda nbytes: None)


def test_the_disk_is_asked_first(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = download.shutil.disk_usage("/")._replace(free=4 * CHUNK)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    brought = downloader()
    with pytest.raises(CapacityError, match=r"4.00 MiB to come, but 4.00 MiB free .*HF_HOME"):
        brought.check_disk([FILE])
    brought.check_disk(["Q4_K_M/model-Q4_K_M-00001-of-00002.gguf"])
    # what is here already needs no room
    blob = brought.folder / "blobs" / f"{hub.repos['org/model-GGUF'].etag(FILE)}.incomplete"
    blob.parent.mkdir(parents=True)
    blob.write_bytes(bytes(CHUNK))
    brought.check_disk([FILE])
