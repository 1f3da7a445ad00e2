"""`ktransformers plan`: arguments, exit codes, what goes to which stream. The builder is replaced by a fake."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

import ktransformers.engine.load.builder  # noqa: F401 - what it takes from others must not be a fake of a test here
from ktransformers.cli.models.plan import add_parser, plan_config
from ktransformers.cli.parsing.options import ArgumentParser
from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.errors import ConfigError
from ktransformers.models.facts import ModelFacts
from ktransformers.optimize.machine import Machine
from tests.support.engines.fake_operators import MACHINE, FakeSource, meta_model

TINY = Machine(10, 10, {"cpu": 10})


def parse(*arguments: str) -> argparse.Namespace:
    parser = ArgumentParser(has_settings=False)
    add_parser(parser.add_subparsers())
    return parser.parse_args(["plan", *arguments])


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], list[EngineConfig]]:
    """A model whose files nobody reads, on a machine that is made up."""

    def install(machine: Machine) -> list[EngineConfig]:
        seen: list[EngineConfig] = []

        def open_model(config: EngineConfig) -> OpenedModel:
            seen.append(config)
            model = meta_model("llama")
            return OpenedModel(config, model.config, ModelFacts.of(model.config), None, model, FakeSource(model))

        monkeypatch.setattr("ktransformers.engine.model.opened.open_model", open_model)
        monkeypatch.setattr("ktransformers.engine.plan.hardware.detect_machine", lambda: machine)
        monkeypatch.setattr("ktransformers.bench.common.bandwidth.bandwidths", lambda devices, threads: {"cpu": 1e9})
        return seen

    return install


def folder_with_config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_flags_take_hyphens_and_underscores(tmp_path: Path) -> None:
    here = str(tmp_path)
    args = parse("--gguf-path", here, "--model_path", here, "--cpu-quant", "q8_0", "--cache_lens", "64", "--strict")
    config = plan_config(args)
    assert (config.gguf_path, config.model_path) == (tmp_path, tmp_path)
    assert (config.cpu_quant, config.cache_lens, config.strict) == ("q8_0", 64, True)
    assert (config.gpu_memory, config.use_cuda) == (0.0, None)
    config = plan_config(parse("--gguf_path", here, "--gpu-memory", "4.5", "--no-use-cuda"))
    assert (config.gpu_memory, config.use_cuda) == (4.5, False)
    config = plan_config(parse("--gguf_path", here, "--chunk_size", "64", "--attention_backend", "triton"))
    assert (config.chunk_size, config.attention_backend) == (64, "triton")


def test_model_is_a_folder_or_a_gguf_file(tmp_path: Path) -> None:
    folder, gguf = folder_with_config(tmp_path), tmp_path / "x.gguf"
    gguf.touch()
    (tmp_path / "shards").mkdir()
    shards = tmp_path / "shards"

    def paths(*arguments: str) -> tuple[Path | None, Path | None]:
        config = plan_config(parse(*arguments))
        return config.model_path, config.gguf_path

    assert paths(str(folder)) == (folder, None)
    assert paths(str(gguf)) == (None, gguf)
    assert paths(str(shards)) == (None, shards)
    assert paths(str(gguf), "--model_path", str(folder)) == (folder, gguf)
    assert paths(str(folder), "--gguf_path", str(gguf)) == (folder, gguf)


def test_wrong_models(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        plan_config(parse(str(tmp_path / "nothing")))
    with pytest.raises(ConfigError, match="too much"):
        plan_config(parse(str(tmp_path), "--model_path", str(tmp_path), "--gguf_path", str(tmp_path)))


def test_table_and_exit_code_0(
    fake_engine: Callable[[Machine], list[EngineConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fake_engine(MACHINE)
    args = parse(str(folder_with_config(tmp_path)))
    assert args.run(args) == 0
    out, err = capsys.readouterr()
    assert out.startswith("fits: ")
    assert "layers.{0-1}" not in out
    assert err == ""
    assert [config.model_path for config in seen] == [tmp_path]


def test_full_adds_the_table_and_modules_every_module(
    fake_engine: Callable[[Machine], list[EngineConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(MACHINE)
    texts = {}
    for flag in ("--full", "--modules"):
        args = parse(str(folder_with_config(tmp_path)), flag)
        assert args.run(args) == 0
        texts[flag] = capsys.readouterr().out
        assert texts[flag].startswith("fits: ")
    assert "model.layers.{0-1}.mlp.up_proj" in texts["--full"]
    assert "model.layers.1.mlp.act_fn" in texts["--modules"]


def test_a_shape_needs_no_files(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ktransformers.engine.plan.hardware.detect_machine", lambda: Machine(64 << 30, 64 << 30, {"cpu": 64 << 30})
    )
    monkeypatch.setattr("ktransformers.bench.common.bandwidth.bandwidths", lambda devices, threads: {"cpu": 1e9})
    args = parse("--synthetic", "gpt-oss-20b")
    assert args.run(args) == 0
    assert "gpt-oss-20b (gpt_oss, 24 layers, 4 of 32 experts a token)" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="needs no model"):
        plan_config(parse("--synthetic", "gpt-oss-20b", "--gguf_path", "."))
    args = parse("--synthetic", "gpt-5")
    with pytest.raises(ConfigError, match="is not one of qwen3-30b-a3b"):
        args.run(args)


def test_exit_code_1_with_the_reason(
    fake_engine: Callable[[Machine], list[EngineConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_engine(TINY)
    args = parse(str(folder_with_config(tmp_path)), "--full")
    assert args.run(args) == 1
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert err == "error: the model does not fit into this machine\n"
    assert "0.0 MiB free" in out


@pytest.mark.parametrize(("machine", "code"), [(MACHINE, 0), (TINY, 1)])
def test_json_is_one_document(
    fake_engine: Callable[[Machine], list[EngineConfig]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    machine: Machine,
    code: int,
) -> None:
    fake_engine(machine)
    args = parse(str(folder_with_config(tmp_path)), "--json")
    assert args.run(args) == code
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] == (code == 0)
    assert document["summary"]["verdict"].startswith("fits" if code == 0 else "does not fit")
    assert document["unmatched_rules"] == []
