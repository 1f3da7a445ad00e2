"""`ktransformers plan`: arguments, exit codes, what goes to which stream. The builder is replaced by a fake."""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from ktransformers.cli import plan as plan_module
from ktransformers.cli.options import ArgumentParser
from ktransformers.cli.plan import add_parser, plan_config
from ktransformers.config import EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.optimize.machine import Machine
from tests.optimize.fakes import MACHINE, meta_model, plan_with

TINY = Machine(10, 10, {"cpu": 10})


def parse(*arguments: str) -> argparse.Namespace:
    parser = ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["plan", *arguments])


@pytest.fixture
def fake_builder(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], list[EngineConfig]]:
    def install(machine: Machine) -> list[EngineConfig]:
        seen: list[EngineConfig] = []

        def plan_model(config: EngineConfig) -> object:
            seen.append(config)
            return plan_with(meta_model("llama"), "- {match: {name: nowhere}, replace: {}}", machine=machine)

        module = types.ModuleType("ktransformers.engine.builder")
        module.plan_model = plan_model  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "ktransformers.engine.builder", module)
        monkeypatch.setattr(plan_module, "set_up_logging", lambda level: None)  # it would outlive the test
        return seen

    return install


def folder_with_config(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_flags_take_hyphens_and_underscores(tmp_path: Path) -> None:
    args = parse("--gguf-path", "a", "--model_path", "b", "--cpu-quant", "q8_0", "--cache_lens", "64", "--strict")
    config = plan_config(args)
    assert (config.gguf_path, config.model_path) == (Path("a"), Path("b"))
    assert (config.cpu_quant, config.cache_lens, config.strict) == ("q8_0", 64, True)
    assert (config.gpu_memory, config.use_cuda) == (0.0, None)
    config = plan_config(parse("--gguf_path", "a", "--gpu-memory", "4.5", "--no-use-cuda"))
    assert (config.gpu_memory, config.use_cuda) == (4.5, False)
    config = plan_config(parse("--gguf_path", "a", "--chunk_size", "64", "--attention_backend", "triton"))
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
        plan_config(parse(str(tmp_path), "--model_path", "a", "--gguf_path", "b"))


def test_table_and_exit_code_0(
    fake_builder: Callable[[Machine], list[EngineConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = fake_builder(MACHINE)
    args = parse(str(folder_with_config(tmp_path)))
    assert args.run(args) == 0
    out, err = capsys.readouterr()
    assert "model.layers.{0-1}.mlp.up_proj" in out
    assert err == ""
    assert [config.model_path for config in seen] == [tmp_path]


def test_exit_code_1_with_the_reason(
    fake_builder: Callable[[Machine], list[EngineConfig]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_builder(TINY)
    args = parse(str(folder_with_config(tmp_path)), "--full")
    assert args.run(args) == 1
    out, err = capsys.readouterr()
    assert "does not fit" in out
    assert "error: the model does not fit into this machine" in err
    assert "10 B are free" in err


@pytest.mark.parametrize(("machine", "code"), [(MACHINE, 0), (TINY, 1)])
def test_json_is_one_document(
    fake_builder: Callable[[Machine], list[EngineConfig]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    machine: Machine,
    code: int,
) -> None:
    fake_builder(machine)
    args = parse(str(folder_with_config(tmp_path)), "--json")
    assert args.run(args) == code
    document = json.loads(capsys.readouterr().out)
    assert document["fits"] == (code == 0)
    assert len(document["unmatched_rules"]) == 1
