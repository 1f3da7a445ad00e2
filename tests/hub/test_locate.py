"""Names of the hub where a path is expected: what is in the cache, and what an error says of the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.errors import ConfigError
from ktransformers.hub.cache import cached_models, cached_repos, remove
from ktransformers.hub.download import Downloader
from ktransformers.hub.locate import LocatedModel, locate_model, locate_path, title_of
from ktransformers.hub.names import parse_name
from ktransformers.hub.remote import list_repository
from ktransformers.hub.variants import find_variants, select
from ktransformers.system.given_paths import check_given_path
from ktransformers.weights.stored_experts.places import place_beside
from tests.support.servers.hub_server import HubServer, Repo

SHARDS = ("Q4_K_M/model-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/model-Q4_K_M-00002-of-00002.gguf")


def pull(text: str) -> Path:
    name = parse_name(text)
    brought = Downloader(list_repository(name))
    variants = find_variants(brought.repository.files)
    for path in (select(variants, name) or variants[0]).files:
        brought.fetch(path, lambda nbytes: None)
    brought.finish()
    return brought.snapshot


def test_names_of_what_is_in_the_cache(hub: HubServer) -> None:
    snapshot = pull("org/model-GGUF:Q4_K_M")
    assert locate_model("org/model-GGUF") == LocatedModel(gguf_path=snapshot / SHARDS[0])
    assert locate_model("https://huggingface.co/org/model-GGUF") == LocatedModel(gguf_path=snapshot / SHARDS[0])
    assert locate_model("org/model-GGUF:q4_k_m") == LocatedModel(gguf_path=snapshot / SHARDS[0])
    assert locate_model(f"org/model-GGUF/{SHARDS[1]}") == LocatedModel(gguf_path=snapshot / SHARDS[0])
    # the path keeps its name, by which the shards are found, though it is a link
    assert (snapshot / SHARDS[0]).is_symlink()
    pull("org/model-GGUF:Q8_0")
    with pytest.raises(ConfigError, match=r"2 times; say which: org/model-GGUF:Q4_K_M, org/model-GGUF:Q8_0"):
        locate_model("org/model-GGUF")
    assert locate_model("org/model-GGUF:Q8_0") == LocatedModel(gguf_path=snapshot / "model-Q8_0.gguf")
    folder = pull("org/model")
    assert locate_model("org/model") == LocatedModel(model_path=folder)
    assert locate_path("org/model", "--model_path") == folder
    assert not (folder / "pytorch_model.bin").exists()


def test_what_is_not_in_the_cache_is_a_command_to_run(hub: HubServer) -> None:
    with pytest.raises(ConfigError) as error:
        locate_path("org/model-GGUF:Q4_K_M", "--gguf_path")
    assert str(error.value) == (
        "--gguf_path org/model-GGUF:Q4_K_M is neither a path nor in the hub's cache; "
        "get it with: ktransformers pull org/model-GGUF:Q4_K_M"
    )
    snapshot = pull("org/model-GGUF:Q4_K_M")
    with pytest.raises(ConfigError, match=r"has no Q8_0.*It has: Q4_K_M"):
        locate_path("org/model-GGUF:Q8_0")
    (snapshot / SHARDS[1]).unlink()
    with pytest.raises(
        ConfigError, match=r"not complete \(Q4_K_M/.*-00002-of-00002.gguf missing\); go on with: ktransformers pull"
    ):
        locate_path("org/model-GGUF:Q4_K_M")
    hub.requests.clear()
    with pytest.raises(ConfigError):
        locate_path("org/model")
    assert not hub.requests


def test_safetensors_that_the_index_misses_are_incomplete(hub: HubServer) -> None:
    hub.repos["org/model"].files["model.safetensors.index.json"] = (
        b'{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}'
    )
    pull("org/model")
    with pytest.raises(ConfigError, match=r"not complete \(model-2.safetensors missing\)"):
        locate_path("org/model")


def test_a_path_that_exists_wins(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("org/model-GGUF:Q8_0")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "model-GGUF").mkdir(parents=True)
    assert locate_model("org/model-GGUF") == LocatedModel(gguf_path=Path("org/model-GGUF"))
    (tmp_path / "org" / "model-GGUF" / "config.json").touch()
    assert locate_model("org/model-GGUF") == LocatedModel(model_path=Path("org/model-GGUF"))


def test_a_mistyped_path_gets_the_nearest_name(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "qwen-Q4_K_M.gguf").touch()
    for text in ("models/qwen-Q4_K_N.gguf", "./models/qwen-q4_K_M.gguf", f"{tmp_path}/models/qwen-Q4_KM.gguf"):
        with pytest.raises(ConfigError, match=r"does not exist; did you mean .*models/qwen-Q4_K_M.gguf\?$"):
            locate_path(text)
    with pytest.raises(
        ConfigError, match=r"ktransformers pull models/qwen-Q4_K_M; did you mean models/qwen-Q4_K_M.gguf\?$"
    ):
        locate_path("models/qwen-Q4_K_M")
    with pytest.raises(ConfigError, match=r"^nowhere/x.gguf does not exist \(nor does the folder nowhere\)$"):
        locate_path("nowhere/x.gguf")


def test_no_path_and_links_to_nothing_are_said(tmp_path: Path) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to("blobs/1234")
    with pytest.raises(ConfigError, match=r"model\.gguf is a link to blobs/1234, which does not exist$"):
        locate_path(link)
    with pytest.raises(ConfigError, match=rf"^--gguf_path {tmp_path}: model\.gguf is a link to blobs/1234, which does"):
        check_given_path("gguf_path", tmp_path)
    with pytest.raises(ConfigError, match=r"^--draft_model is empty: name a model"):
        locate_path("", "--draft_model")


def test_a_path_that_the_system_refuses_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^--gguf_path a+ cannot be read: File name too long$"):
        locate_path("a" * 300, "--gguf_path")


def test_links_to_elsewhere_say_so() -> None:
    with pytest.raises(ConfigError, match=r"^--gguf_path https://example.com/m.gguf is not on the hub"):
        locate_path("https://example.com/m.gguf", "--gguf_path")


def test_revisions_are_apart(hub: HubServer) -> None:
    first = pull("org/model-GGUF:Q8_0")
    repo = hub.repos["org/model-GGUF"]
    repo.commit = "2" * 40
    repo.revisions = {"v1": "1" * 40}
    repo.files["model-Q8_0.gguf"] = b"new"
    second = pull("org/model-GGUF:Q8_0")
    assert locate_path("org/model-GGUF") == second / "model-Q8_0.gguf"
    assert locate_path("org/model-GGUF@1111111") == first / "model-Q8_0.gguf"
    (model,) = cached_models("org/model-GGUF")
    assert remove("org/model-GGUF", model) == 4 * 2**20 + 5 + 3 + 1  # and a projector, which both have
    assert cached_repos() == []


def test_removing_one_of_two_leaves_the_other(hub: HubServer) -> None:
    hub.repos["copy/model-GGUF"] = Repo(hub.repos["org/model-GGUF"].files)  # has the same commit
    for repo in ("copy", "org"):
        pull(f"{repo}/model-GGUF:Q8_0")
    pull("org/model-GGUF:Q4_K_M")
    q4, q8 = cached_models("org/model-GGUF")
    assert (q4.nbytes, q8.nbytes) == (3 * 2**19 + 1, 4 * 2**20 + 5 + 1)  # with a projector
    assert remove("org/model-GGUF", q8, dry_run=True) == remove("org/model-GGUF", q8) == 4 * 2**20 + 5
    assert [model.name for model in cached_models("org/model-GGUF")] == ["org/model-GGUF:Q4_K_M"]
    assert sum(path.stat().st_size for path in (q4.snapshot.parents[1] / "blobs").iterdir()) == 3 * 2**19 + 1
    assert remove("org/model-GGUF") == 3 * 2**19 + 1
    assert cached_repos() == ["copy/model-GGUF"]
    assert locate_path("copy/model-GGUF:Q8_0").stat().st_size == 4 * 2**20 + 5


def test_a_packed_file_of_experts_goes_with_its_model(hub: HubServer) -> None:
    pull("org/model-GGUF:Q8_0")
    pull("org/model-GGUF:Q4_K_M")
    q4, q8 = cached_models("org/model-GGUF")
    for model in (q4, q8):
        place_beside([model.path]).write_bytes(bytes(1000))
    assert remove("org/model-GGUF", q8) == 4 * 2**20 + 5 + 1000
    assert not place_beside([q8.path]).exists()
    assert place_beside([q4.path]).exists()
    assert [model.name for model in cached_models("org/model-GGUF")] == ["org/model-GGUF:Q4_K_M"]


def test_a_local_path_imports_no_hub(tmp_path: Path) -> None:
    code = (
        f"import sys\nfrom ktransformers.hub.locate import locate_model\nlocate_model({str(tmp_path)!r})\n"
        "heavy = {'torch', 'huggingface_hub', 'httpx2'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_titles(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pull("org/model-GGUF:Q8_0")
    pull("org/model")
    assert title_of(locate_path("org/model-GGUF")) == "model-Q8_0"
    assert title_of(locate_path("org/model")) == "model"
    (tmp_path / "Qwen3").mkdir()
    monkeypatch.chdir(tmp_path / "Qwen3")
    assert title_of(Path(".")) == title_of(Path("../Qwen3/")) == "Qwen3"
