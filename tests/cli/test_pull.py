"""`ktransformers pull`, `list` and `rm` against a hub on loopback."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ktransformers.cli import main
from ktransformers.cli.models import pull_progress
from ktransformers.cli.models.pull_progress import LineProgress, make_progress
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.hub import download
from ktransformers.hub.locate import locate_model, locate_path
from ktransformers.kernels.types import QuantType
from ktransformers.optimize.machine import Machine
from ktransformers.weights.gguf.file import open_gguf
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors
from tests.support.servers.hub_server import HubServer, Repo, hub_on_loopback

QUANTS = {"F16": QuantType.F16, "Q8_0": QuantType.Q8_0, "Q4_0": QuantType.Q4_0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in three types, one of them in shards, and as safetensors."""
    folder = tmp_path_factory.mktemp("models")
    model = tiny_model("qwen3_moe")
    for label, kind in QUANTS.items():
        write_gguf(model, folder / f"tiny-{label}.gguf", kind, kind)
    (folder / "shards").mkdir()
    write_gguf(model, folder / "shards" / "tiny-Q4_1.gguf", QuantType.Q4_1, QuantType.Q4_1, shard_max_tensors=10)
    write_safetensors(model, folder / "safetensors")
    return folder


@pytest.fixture(scope="module")
def needed(folder: Path) -> dict[str, int]:
    """Bytes that a plan of each local file needs."""
    paths = {label: folder / f"tiny-{label}.gguf" for label in QUANTS}
    return {label: plan_model(EngineConfig(gguf_path=path)).total_bytes["cpu"] for label, path in paths.items()}


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    def files(folder: Path, pattern: str) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(folder.glob(pattern))}

    repos = {
        "org/tiny-GGUF": Repo(files(folder, "*.gguf") | {"mmproj-F16.gguf": b"x"}),
        "org/shards-GGUF": Repo(files(folder / "shards", "*.gguf")),
        "org/tiny": Repo(files(folder / "safetensors", "*") | {"pytorch_model.bin": b"x"}),
        "org/pickles": Repo({"config.json": b"{}", "pytorch_model.bin": b"x"}),
        "org/gated": Repo(files(folder, "*Q4_0.gguf"), access="gated"),
    }
    with hub_on_loopback(repos, tmp_path / "cache", monkeypatch) as server:
        yield server


def with_memory(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    machine = Machine(ram_bytes=nbytes, available_bytes=nbytes, devices={"cpu": nbytes})
    monkeypatch.setattr("ktransformers.engine.plan.hardware.detect_machine", lambda: machine)


def test_the_best_quantization_that_the_plan_says_fits(
    hub: HubServer,
    needed: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert needed["Q4_0"] < needed["Q8_0"] < needed["F16"]
    # one byte too few for the smallest: nothing is taken
    with_memory(monkeypatch, needed["Q4_0"] - 1)
    assert main(["pull", "org/tiny-GGUF"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "error: nothing of org/tiny-GGUF fits into this machine (Q8_0 " in err
    assert "Q4_0: 720.00 KiB needed on cpu, 720.00 KiB free" in err
    assert not (tmp_path / "cache").exists()
    # one too few for the next: the smaller one, though the larger file alone would fit
    with_memory(monkeypatch, needed["Q8_0"] - 1)
    assert main(["pull", "org/tiny-GGUF"]) == 0
    out, err = capsys.readouterr()
    path = Path(out.rstrip("\n"))
    assert path.read_bytes() == hub.repos["org/tiny-GGUF"].files["tiny-Q4_0.gguf"]
    assert "left out" not in err
    assert (path.parent / "mmproj-F16.gguf").read_bytes() == b"x"
    assert "Q4_0 (208.47 KiB): the best that fits; Q8_0 does not: 898.00 KiB needed on cpu, 898.00 KiB free\n" in err
    assert err.endswith("checksums verified; try: ktransformers chat org/tiny-GGUF:Q4_0\n")
    assert "100 %: 208.47 KiB of 208.47 KiB" in err
    # just enough: the better one; 16 bits are not taken while there are 8
    with_memory(monkeypatch, needed["Q8_0"])
    assert main(["pull", "org/tiny-GGUF"]) == 0
    assert Path(capsys.readouterr().out.strip()).name == "tiny-Q8_0.gguf"
    with_memory(monkeypatch, 10 * needed["F16"])
    assert main(["pull", "https://huggingface.co/org/tiny-GGUF"]) == 0
    assert "Q8_0 (386.47 KiB): the best that fits\n" in capsys.readouterr().err


def test_a_full_disk_counts_as_one_that_does_not_fit(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = download.shutil.disk_usage("/")._replace(free=300 << 10)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda path: usage)
    assert main(["pull", "org/tiny-GGUF"]) == 0
    assert "Q8_0 does not: 386.47 KiB to come, but 300.00 KiB free on the disk" in capsys.readouterr().err
    assert main(["pull", "org/tiny-GGUF:Q8_0"]) == 1
    assert "set HF_HOME to a folder elsewhere" in capsys.readouterr().err


def test_what_is_named_or_forced_is_taken(
    hub: HubServer, needed: dict[str, int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_memory(monkeypatch, needed["Q4_0"] - 1)
    assert main(["pull", "org/tiny-GGUF:q8_0"]) == 0
    assert "warning: Q8_0 is taken because you named it, but it does not fit: 898.00 KiB" in capsys.readouterr().err
    assert main(["pull", "org/tiny-GGUF", "--force"]) == 0
    out, err = capsys.readouterr()
    assert "Q4_0 (208.47 KiB): taken by force, it does not fit" in err
    assert Path(out.strip()).name == "tiny-Q4_0.gguf"
    hub.requests.clear()
    assert main(["pull", "org/tiny-GGUF/tiny-Q4_0.gguf"]) == 0
    assert "here already" in capsys.readouterr().err
    assert not any(request.sent for request in hub.requests)


def test_shards_are_opened_through_the_links_of_the_cache(hub: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/shards-GGUF"]) == 0
    path = locate_path("org/shards-GGUF:Q4_1")
    assert str(path) == capsys.readouterr().out.strip()
    assert path.is_symlink()
    assert len(open_gguf(path).files) > 1
    assert plan_model(EngineConfig(gguf_path=path)).misfit() is None


def test_safetensors(hub: HubServer, needed: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "org/tiny"]) == 0
    place = Path(capsys.readouterr().out.strip())
    assert {path.name for path in place.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}
    files = locate_model("org/tiny")
    assert files.model_path == place
    assert plan_model(EngineConfig(files.model_path, files.gguf_path)).misfit() is None


def test_ctrl_c_leaves_what_came_and_the_same_command_goes_on(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    size = len(hub.repos["org/tiny-GGUF"].files["tiny-Q8_0.gguf"])
    monkeypatch.setattr(download, "CHUNK", 1 << 16)
    advance = LineProgress.advance

    def interrupted(self: LineProgress, nbytes: int) -> None:
        advance(self, nbytes)
        if self.done > size // 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull_progress.LineProgress, "advance", interrupted)
        assert main(["pull", "org/tiny-GGUF:Q8_0"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("stopped at 256.00 KiB of 386.47 KiB; the same command goes on from there\n")
    assert main(["list"]) == 0
    assert "org/tiny-GGUF: a download of which 256.00 KiB came" in capsys.readouterr().err
    hub.requests.clear()
    assert main(["pull", "org/tiny-GGUF:Q8_0", "--force"]) == 0
    assert "256.00 KiB of 386.47 KiB are here; going on\n" in capsys.readouterr().err
    assert hub.bodies("tiny-Q8_0.gguf")[-1].range == f"bytes={256 << 10}-"
    assert hub.bodies("tiny-Q8_0.gguf")[-1].sent == size - (256 << 10)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/tiny-GGUF:Q4_K_M", "error: org/tiny-GGUF has no Q4_K_M; did you mean Q4_0? It has: F16, Q4_0, Q8_0\n"),
        ("org/pickles", "error: org/pickles has its weights as Python pickles only, which can run code; "),
        ("org/gated", "error: org/gated is gated: accept its terms at http"),
        ("org/missing", "error: there is no model http"),
        ("tiny.gguf", "error: 'tiny.gguf' is not the name of a model: a model is called org/name, "),
    ],
)
def test_refusals_are_one_line(
    hub: HubServer, name: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["pull", name]) == 2
    out, err = capsys.readouterr()
    (line,) = (line for line in err.splitlines(keepends=True) if line.startswith("error: "))
    assert line.startswith(message)
    assert err.endswith(line)
    assert out == ""


def test_a_hub_that_cannot_be_reached_may_be_tried_again(
    hub: HubServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert main(["pull", "org/tiny-GGUF"]) == 1
    assert capsys.readouterr().err.startswith("error: http://127.0.0.1:9 cannot be reached (")


def test_an_architecture_that_cannot_run_is_refused_before_the_download(
    hub: HubServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    repo = hub.repos["org/tiny-GGUF"]
    repo.files["tiny-Q8_0.gguf"] = repo.files["tiny-Q8_0.gguf"].replace(b"qwen3moe", b"qwen3xyz")
    assert main(["pull", "org/tiny-GGUF:Q8_0"]) == 2
    err = capsys.readouterr().err
    assert "qwen3xyz" in err
    assert err.endswith("(--force downloads it all the same)\n")
    assert "ktransformers-pull-" not in err
    assert not (tmp_path / "cache").exists()
    assert main(["pull", "org/tiny-GGUF:Q8_0", "--force"]) == 0


def test_list_and_rm(hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    out, err = capsys.readouterr()
    assert (out, err.startswith("no models in ")) == ("", True)
    for name in ("org/tiny-GGUF:Q8_0", "org/tiny-GGUF:Q4_0", "org/tiny"):
        assert main(["pull", name]) == 0
    hub.requests.clear()
    capsys.readouterr()
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["NAME", "org/tiny", "org/tiny-GGUF:Q4_0", "org/tiny-GGUF:Q8_0"]
    assert lines[2].split()[1:3] == ["208.47", "KiB"]
    assert [line.split()[-1] for line in lines[1:]] == ["safetensors", "GGUF", "GGUF"]
    assert main(["list", "--json"]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [document["name"] for document in documents] == [line.split()[0] for line in lines[1:]]
    assert all(Path(document["path"]).exists() for document in documents)
    size = documents[2]["bytes"]

    assert main(["rm", "org/tiny-GGUF:Q8_0"]) == 2  # no terminal, no --yes
    assert "pass --yes" in capsys.readouterr().err
    assert main(["rm", "org/tiny-GGUF:Q8_0", "--yes"]) == 0
    assert capsys.readouterr().out == f"org/tiny-GGUF:Q8_0: {size / 1024:.2f} KiB freed\n"
    assert locate_path("org/tiny-GGUF").name == "tiny-Q4_0.gguf"
    assert main(["rm", "org/tinny", "-y"]) == 2
    assert capsys.readouterr().err == "error: org/tinny is not in the cache; did you mean org/tiny?\n"
    assert main(["rm", "org/tiny-GGUF:Q8_0", "-y"]) == 2
    assert "has no Q8_0" in capsys.readouterr().err

    monkeypatch.setattr(sys, "stdin", _Terminal("n\ny\n"))
    assert main(["rm", "org/tiny", "org/tiny-GGUF"]) == 1
    out, err = capsys.readouterr()
    assert "org/tiny: kept" in err
    assert out.startswith("org/tiny-GGUF: ")
    assert main(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["NAME", "org/tiny"]
    assert not hub.requests


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_for_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    now = iter([0.0, 2.0, 4.0, 5.0])
    progress = LineProgress(1000 << 20, 150 << 20, clock=lambda: next(now))
    for nbytes in (40 << 20, 20 << 20, 30 << 20, -(100 << 20), 200 << 20, 660 << 20):
        progress.advance(nbytes)
    assert capsys.readouterr().err == (
        " 20 %: 210.00 MiB of 1000.00 MiB, 30.00 MiB/s, 26 s left\n"
        " 30 %: 340.00 MiB of 1000.00 MiB, 47.50 MiB/s, 14 s left\n"
        "100 %: 1000.00 MiB of 1000.00 MiB, 170.00 MiB/s, 0 s left\n"
    )


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with make_progress("org/tiny-GGUF:Q8_0", 4 << 20, 1 << 20) as progress:
        progress.advance(3 << 20)
    assert "tiny-GGUF:Q8_0" in screen.getvalue()
    assert "4.0/4.0 MiB" in screen.getvalue()
