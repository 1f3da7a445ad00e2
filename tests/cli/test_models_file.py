"""The file of several models: what is wrong in it is said with its line, before anything is loaded or bound."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from ktransformers.cli import main
from ktransformers.cli.serve import models as serve_models
from ktransformers.cli.serve.command import server_parser
from ktransformers.cli.serve.models import models_file
from ktransformers.cli.serve.models_file import read_models_file
from ktransformers.errors import ConfigError
from ktransformers.server.multi_model import needs
from ktransformers.server.multi_model.needs import ModelNeeds, ToPlan
from tests.support.models.demo import DEMO_GGUF

ONE = f"models:\n  - name: a\n    gguf_path: {DEMO_GGUF}\n"
TWO = ONE + f"  - name: [b, b:30b]\n    gguf_path: {DEMO_GGUF}\n    cache_lens: 512\n"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of whoever runs the tests. Nothing gets as far as to be planned."""

    def refuse(models: object) -> None:
        raise AssertionError("it is planned")

    monkeypatch.setattr(needs, "find_needs", refuse)
    for name in os.environ:
        if name.startswith("KTRANSFORMERS_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "models.yaml"


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What is said about wrong usage or a wrong value, in one line."""
    try:
        code = main(["serve", *words, "--log_level", "error"])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code in (1, 2)
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    return said.removeprefix("error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "{file}: it has no `models:`, a list of models with `name` and `gguf_path`"),
        ("port: 5\n", "{file}: it has no `models:`"),
        ("- a\n", "{file}: line 1: expected lines of the form `flag: value`"),
        ("models: [\n", "{file}: line 2: not YAML"),
        ("models:\n", "{file} line 1: models must be a list, each with a dash"),
        ("models: []\n", "{file} line 1: models must be a list"),
        ("models:\n  a: b\n", "{file} line 2: models must be a list"),
        ("models:\n  - a\n", "{file} line 2: a model must be flags of the form `flag: value`"),
        (ONE + ONE, "{file} line 5: models is given twice"),
        (f"models:\n  - gguf_path: {DEMO_GGUF}\n", "{file} line 2: the model has no `name`"),
        ("models:\n  - name: ['']\n", "{file} line 2: a name must not be empty"),
        ("models:\n  - name: a\n    name: b\n", "{file}: line 3: name is given twice, first in {file} line 2"),
        (TWO + "  - name: [c, b]\n", "{file} line 7: the name 'b' is taken, see {file} line 4"),
        (ONE + "    load: later\n", "{file} line 4: load must be on_demand or start, not 'later'"),
        (ONE + "    keep: perhaps\n", "{file} line 4: keep must be true or false, not 'perhaps'"),
        (ONE + "    cache_len: 5\n", "{file} line 4: unknown key cache_len; did you mean cache_lens?"),
        (ONE + "    cache_lens: many\n", "{file} line 4: --cache_lens: invalid int value: 'many'"),
        (ONE + "    cache_lens: -1\n", "{file} line 2 (a): --cache_lens must be at least 0, got -1"),
        (ONE + "    port: 5\n", "{file} line 4: port: it is a flag of the server: put it above `models`"),
        (ONE + "    idle_seconds: 5\n", "{file} line 4: idle_seconds: it is a flag of the server"),
        (ONE + "    model_name: x\n", "{file} line 4: model_name: name says it"),
        (ONE + "    served-model-name: x\n", "{file} line 4: model_name: name says it"),
        (ONE + "    state_dir: x\n", "{file} line 4: state_dir is not for several models"),
        ("state_dir: x\n" + ONE, "{file} line 1: state_dir is not for several models"),
        ("profile: x\n" + ONE, "{file} line 1: profile is not for several models: a profile is of one model"),
        ("cluster: local\n" + ONE, "{file} line 1: cluster is not for several models"),
        ("replicas: 2\n" + ONE, "{file} line 1: --replicas is about replicas, which only --cluster has"),
        ("gguf_path: x\n" + ONE, "gguf_path in {file} line 1 is about one model: give it to one of those that"),
        ("prot: 5\n" + ONE, "{file} line 1: unknown key prot; did you mean port?"),
        ("port: x\n" + ONE, "{file} line 1: --port: invalid int value: 'x'"),
        ("port: 70000\n" + ONE, "{file} line 1: --port must be between 0 and 65535, got 70000"),
        ("memory: -1\n" + ONE, "{file} line 1: --memory must be at least 0, got -1.0"),
        ("idle_seconds: nan\n" + ONE, "{file} line 1: --idle_seconds must be at least 0, got nan"),
        (ONE + "    backend_type: transformers\n", "{file} line 2 (a): --backend_type transformers: the transformers"),
        (ONE + "    pipeline: 2\n", "{file} line 2 (a): --pipeline: the memory of models beside each other is"),
        (ONE + "    backend_type: other\n", "{file} line 2 (a): --backend_type other is not one of"),
        ("models:\n  - name: a\n", "{file} line 2 (a): the model has no files: give it gguf_path"),
        (
            "models:\n  - name: a\n    gguf_path: /none.gguf\n",
            "{file} line 2 (a): --gguf_path /none.gguf does not exist",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_line(
    text: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    said = refusal(capsys, str(file))
    assert said.startswith(message.format(file=file)), said


def test_one_folder_of_pages_is_for_one_model(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(f"kv_disk_path: {tmp_path}\n{TWO}")
    assert "is the kv_disk_path of several models; give each its own folder" in refusal(capsys, str(file))


def test_what_does_not_go_together(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(ONE)
    assert refusal(capsys, str(file), "--models", str(file)).startswith("MODEL and --models together say too much")
    said = refusal(capsys, str(file), "--gguf_path", str(DEMO_GGUF))
    assert said.startswith("gguf_path on the command line is about one model")
    assert refusal(capsys, str(DEMO_GGUF), "--memory", "3").startswith("--memory is about several models")
    assert refusal(capsys, "--idle_seconds", "3").startswith("--idle_seconds is about several models")
    assert refusal(capsys, "--config", str(file)).startswith(f"--config {file}: the file lists models: give it in")
    assert refusal(capsys, str(file) + "x.yaml").startswith(f"{file}x.yaml: the file cannot be read: No such file")


def test_names_loads_and_settings(file: Path) -> None:
    file.write_text("port: 5\n" + TWO + "    load: start\n    keep: yes\n  - {name: c, load: on_demand, keep: false}\n")
    found = read_models_file(file)
    assert [(one.names, one.is_first, one.is_kept) for one in found.models] == [
        (("a",), False, False),
        (("b", "b:30b"), True, True),
        (("c",), False, False),
    ]
    assert [one.name for one in found.settings] == ["port"]
    assert [(one.name, one.texts, one.origin) for one in found.models[1].settings] == [
        ("gguf_path", (str(DEMO_GGUF),), f"{file} line 6"),
        ("cache_lens", ("512",), f"{file} line 7"),
    ]


def test_a_yaml_file_in_the_place_of_a_model_is_such_a_file() -> None:
    parser = server_parser()
    for words, path in ((["x.yaml"], "x.yaml"), (["--models", "x"], "x"), (["-m", "y.yml"], "y.yml")):
        assert models_file(parser.parse_args(words)) == Path(path)
    assert models_file(parser.parse_args([])) is None
    assert models_file(parser.parse_args(["x.gguf"])) is None


def asked_for(file: Path, *words: str) -> tuple[argparse.Namespace, list[serve_models._Asked]]:
    parser = server_parser()
    args = parser.parse_args([str(file), *words])
    found = read_models_file(file)
    general = parser.with_settings(args, found.settings, without=("model", "models"))
    serve_models._check_general(general, found)
    return general, [serve_models._asked(args, general, found, entry, parser) for entry in found.models]


def test_the_command_line_wins_over_a_models_lines_and_those_over_what_stands_above(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(
        "cache_lens: 1024\nchunk_size: 64\nport: 5\ntemperature: 0.5\ngpu_memory: 3\n" + TWO + "    gpu_memory: 2\n"
    )
    general, (a, b) = asked_for(file)
    assert (general.port, general.gpu_memory) == (5, 3.0)
    assert [(one.config.cache_lens, one.config.chunk_size) for one in (a, b)] == [(1024, 64), (512, 64)]
    assert [one.config.gpu_memory for one in (a, b)] == [3.0, 2.0]
    assert a.server.sampling == {"temperature": 0.5}
    assert (b.server.model_names, b.server.listed_names) == (("b", "b:30b"), ("b", "b:30b"))
    monkeypatch.setenv("KTRANSFORMERS_CHUNK_SIZE", "32")
    general, (a, b) = asked_for(file, "--cache_lens", "2048", "--port", "6", "--gpu_memory", "4")
    assert general.port == 6
    assert [(one.config.cache_lens, one.config.chunk_size) for one in (a, b)] == [(2048, 32), (2048, 32)]
    assert [one.config.gpu_memory for one in (a, b)] == [4.0, 2.0]


def test_a_list_above_the_models_is_theirs_and_their_own_list_replaces_it(file: Path) -> None:
    file.write_text("cors_origins: [http://x, http://y]\n" + ONE)
    general, (a,) = asked_for(file)
    assert a.server.cors_origins == ("http://x", "http://y") == tuple(general.cors_origins)


GIB = 1 << 30


def test_memory_is_what_is_said_or_free_and_no_more_than_there_is(file: Path) -> None:
    file.write_text(TWO)
    found, parser = read_models_file(file), server_parser()
    planned = [ModelNeeds({"cpu": GIB}, {"cpu": 8 * GIB, "cuda:0": 4 * GIB}, 16 * GIB)] * 2

    def memory(*words: str) -> dict[str, int]:
        return serve_models._memory(parser.parse_args([str(file), *words]), found, planned)

    assert memory() == {"cpu": 8 * GIB, "cuda:0": 4 * GIB}
    assert memory("--memory", "2", "--gpu_memory", "3") == {"cpu": 2 * GIB, "cuda:0": 3 * GIB}
    assert memory("--gpu_memory", "5")["cuda:0"] == 4 * GIB
    with pytest.raises(ConfigError, match=r"--memory must be at most 16.0 \(this machine's\), got 17"):
        memory("--memory", "17")
    with pytest.raises(ConfigError, match=r"models.yaml line 4 \(b\): no room"):
        serve_models._memory(parser.parse_args([str(file)]), found, [planned[0], ModelNeeds(error="no room")])


def test_what_is_planned_is_what_is_loaded_and_the_memory_is_the_plans_too(file: Path) -> None:
    file.write_text(TWO + "    backend_type: ktransformers\n")
    general, (a, b) = asked_for(file, "--memory", "2", "--page_size", "32")
    made = serve_models._to_plan(a, general)
    assert (made.page_size, made.max_batch_size, made.memory) == (32, 16, 2 * GIB)
    assert made.beside > 0
    assert serve_models._to_plan(b, general) == ToPlan(b.config, memory=2 * GIB)


def test_the_example_is_right() -> None:
    _, asked = asked_for(Path("examples/models.yaml"))
    assert [one.entry.names for one in asked] == [("demo", "demo:15m"), ("demo-short",), ("demo-alone",)]
    assert [one.args.max_batch_size for one in asked] == [4, 4, 4]
    assert [one.server.sampling for one in asked] == [{}, {}, {"temperature": 0.0}]
    assert all(one.config.gguf_path is not None and one.config.gguf_path.samefile(DEMO_GGUF) for one in asked)
