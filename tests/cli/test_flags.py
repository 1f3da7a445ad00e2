"""Where values of flags come from, how they may be spelled, and what is said about those that are wrong."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest
import yaml

from ktransformers.cli import build_parser, main
from ktransformers.cli.chat.command import local_chat_parser
from ktransformers.cli.parsing.options import (
    ArgumentParser,
    add_model_argument,
    add_plan_flags,
    engine_config,
    model_files,
)
from ktransformers.cli.parsing.parser import leaves
from ktransformers.cli.parsing.settings import OTHER_VARIABLES, SECRETS
from ktransformers.cli.serve.command import server_parser
from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu import base

COMMANDS = [parser.prog.split()[1:] for parser in leaves(build_parser())]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of whoever runs the tests."""
    for name in os.environ:
        if name.startswith("KTRANSFORMERS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "serve.yaml"


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of wrong usage."""
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--strict"], "strict", True),
        (["--strict", "--no-strict"], "strict", False),
        (["--strict=False"], "strict", False),
        (["--strict", "TRUE"], "strict", True),
        (["--strict", "no"], "strict", False),
        (["--use_cuda_graph=True"], "use_cuda_graph", True),
        (["--use-cuda-graph=0"], "use_cuda_graph", False),
        (["--no_use_cuda_graph=false"], "use_cuda_graph", True),
        (["--web", "False"], "web", False),
        (["--force_think", "1", "x.gguf"], "model", "x.gguf"),
        (["--force_think", "x.gguf"], "model", "x.gguf"),
        (["--log_level", "INFO"], "log_level", "info"),
        (["--model_dir", "/m"], "model_path", Path("/m")),
        (["--gguf_path=~/m"], "gguf_path", Path.home() / "m"),
        (["--port", "1", "--", "--no-model"], "model", "--no-model"),
        (["x.gguf", "--port", "1"], "model", "x.gguf"),
        (["--model_name=a=b"], "model_name", ["a=b"]),
    ],
)
def test_spellings(words: list[str], name: str, value: object) -> None:
    for args in (parse("serve", *words), server_parser().parse_args(words)):
        assert getattr(args, name) == value


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serv"], "unknown command 'serv'; did you mean serve? (see ktransformers --help)"),
        (["bench", "oflfine"], "unknown command 'oflfine'; did you mean offline? (see ktransformers bench --help)"),
        (["help", "plna"], "unknown command 'plna'; did you mean plan?"),
        (["frobnicate"], "unknown command 'frobnicate'; there are chat, run, serve, plan, pull"),
        (["/"], "unknown command '/'; to talk to a model: ktransformers chat /"),
        (["serve", "--strict=perhaps"], "--strict is on or off: true or false, not 'perhaps'"),
        (["serve", "--prot", "1"], "unknown argument --prot; did you mean --port?"),
        (["plan", "--port", "1"], "--port is not a flag of ktransformers plan but of ktransformers serve"),
        (["plan", "-np", "1"], "-np is not a flag of ktransformers plan but of ktransformers serve"),
        (["serve", "a", "b"], "unexpected argument b; MODEL is given already"),
        (["--port", "x"], "argument --port: invalid int value: 'x' (see ktransformers serve --help)"),
        (["serve", "--config", "/nowhere.yaml"], "--config /nowhere.yaml: the file cannot be read: No such file"),
        (["plan", "--mmproj", ""], "argument --mmproj: the path is empty (see ktransformers plan --help)"),
        (["serve", "--state_dir", ""], "argument --state_dir: the path is empty (see ktransformers serve --help)"),
        (["quantize", "model.gguf", ""], "argument OUT: the path is empty (see ktransformers quantize --help)"),
    ],
)
def test_wrong_usage_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, *words).startswith(f"error: {message}")


def test_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("usage: ktransformers [options] COMMAND")
    assert main(["--gguf_path", "/nowhere"]) == 2  # upstream's `ktransformers` was its server
    assert capsys.readouterr().err.startswith("error: --gguf_path /nowhere does not exist")


def test_the_nearer_source_wins(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    config_file.write_text("port: 1\nhost: file\nmax-queue: 7\napi_key: [a, b]\n")
    monkeypatch.setenv("KTRANSFORMERS_CONFIG", str(config_file))
    monkeypatch.setenv("KTRANSFORMERS_HOST", "variable")
    monkeypatch.setenv("KTRANSFORMERS_PORT", "2")
    monkeypatch.setenv("KTRANSFORMERS_SSL_KEYFILE", "")  # empty: not set
    args = parse("serve", "--port", "3", "--api-key", "c")
    assert (args.port, args.host, args.max_queue, args.api_key, args.drain_seconds) == (3, "variable", 7, ["c"], 30.0)
    assert args.ssl_keyfile is None
    assert args.value_sources == {
        "config": "KTRANSFORMERS_CONFIG",
        "port": "command line",
        "api_key": "command line",
        "host": "KTRANSFORMERS_HOST",
        "max_queue": f"{config_file} line 3",
    }


def test_kinds_of_values(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    monkeypatch.setenv("KTRANSFORMERS_MODEL_NAME", "a,b")
    monkeypatch.setenv("KTRANSFORMERS_STRICT", "true")
    monkeypatch.setenv("KTRANSFORMERS_USE_CUDA", "false")
    monkeypatch.setenv("KTRANSFORMERS_CACHE_LENS", "4096")
    monkeypatch.setenv("KTRANSFORMERS_MODEL", "x.gguf")
    args = parse("serve")
    assert (args.model_name, args.strict, args.use_cuda, args.cache_lens) == (["a", "b"], True, False, 4096)
    assert args.model == "x.gguf"
    config_file.write_text(
        "prefill: [128, 256]\nlog_level: WARNING\nmodel: y.gguf\nstrict: no\nlayers: null\n---\n"[:-4]
    )
    args = parse("bench", "offline", "--config", str(config_file))
    assert (args.prefill, args.log_level, args.strict, args.layers) == ("128,256", "warning", True, None)
    assert args.model == "x.gguf"  # the variable wins
    monkeypatch.setenv("KTRANSFORMERS_SYSTEM", "Hello, world")
    assert parse("chat").system == "Hello, world"


def test_a_model_is_one_choice(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    """Who names another model must not get the folder of the first one with it."""
    config_file.write_text("model_path: /folder\ngguf_path: /file\nport: 5\n")
    args = parse("serve", "x.gguf", "--config", str(config_file))
    assert (args.model, args.model_path, args.gguf_path, args.port) == ("x.gguf", None, None, 5)
    monkeypatch.setenv("KTRANSFORMERS_MODEL", "y.gguf")
    args = parse("serve", "--gguf_path", "z.gguf", "--config", str(config_file))
    assert (args.model, args.model_path, args.gguf_path) == (None, None, Path("z.gguf"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("port: x", "{file} line 1: --port: invalid int value: 'x'"),
        ("# a\n\nprot: 1", "{file} line 3: unknown key prot; did you mean port?"),
        ("port: {a: 1}", "--config {file}: line 1: port must be one value, or a list of values"),
        ("port: 1\nport: 2", "--config {file}: line 2: port is given twice, first in {file} line 1"),
        ("ctx-size: 1\ncache_lens: 2", "{file} line 2: cache_lens says what {file} line 1 says already"),
        ("strict: perhaps", "{file} line 1: --strict is on or off: true or false, not 'perhaps'"),
        ("log_level: loud", "{file} line 1: --log_level: invalid choice: 'loud'"),
        ("gpu_memory_utilization: 0.9", "{file} line 1: --gpu_memory_utilization: it is a share of the GPU"),
        ("help: true", "{file} line 1: help cannot be set here"),
        ("config: x", "{file} line 1: config cannot be set here"),
        ("print_config: true", "{file} line 1: print_config cannot be set here"),
        ("- port", "--config {file}: line 1: expected lines of the form `flag: value`"),
        ("port: [1", "--config {file}: line 1: not YAML"),
    ],
)
def test_errors_name_file_and_line(
    text: str, message: str, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text(text)
    said = refusal(capsys, "serve", "--config", str(config_file))
    assert said.startswith(f"error: {message.format(file=config_file)}"), said


def test_ranges_name_the_source(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text("cache_lens: -1\n")
    assert main(["serve", "--config", str(config_file)]) == 2
    assert capsys.readouterr().err == f"error: {config_file} line 1: --cache_lens must be at least 0, got -1\n"
    monkeypatch.setenv("KTRANSFORMERS_TEMPERATURE", "-2")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("error: KTRANSFORMERS_TEMPERATURE: temperature must be at least 0")
    monkeypatch.setenv("KTRANSFORMERS_MODEL", "/nowhere")
    assert main(["serve"]) == 2
    assert capsys.readouterr().err.startswith("error: KTRANSFORMERS_MODEL: /nowhere does not exist")
    assert main(["serve", "/elsewhere"]) == 2
    assert capsys.readouterr().err.startswith("error: /elsewhere does not exist")
    monkeypatch.setenv("KTRANSFORMERS_PORT", "x")
    assert refusal(capsys, "serve").startswith("error: KTRANSFORMERS_PORT: --port: invalid int value: 'x'")


def test_a_file_for_several_commands(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --config serve.yaml` says whether a server's model fits."""
    config_file.write_text("cache_lens: 5\nport: 1\nmax-num-seqs: 3\nmodel: x\n")
    assert parse("plan", "--config", str(config_file)).cache_lens == 5
    notes = [f"note: {config_file} line 2: port", f"note: {config_file} line 3: max_num_seqs"]
    assert capsys.readouterr().err == "".join(f"{note} has no effect on ktransformers plan\n" for note in notes)
    assert server_parser().parse_args(["--config", str(config_file)]).max_batch_size == 3
    parse("doctor", "--config", str(config_file))
    assert capsys.readouterr().err.count("has no effect on ktransformers doctor") == 3


def test_unknown_variables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KTRANSFORMERS_CACHE_LEN", "1")
    monkeypatch.setenv("KTRANSFORMERS_QQQ", "1")
    monkeypatch.setenv("KTRANSFORMERS_ISA", "scalar")
    monkeypatch.setenv("KTRANSFORMERS_PORT", "1")  # a flag of another command
    assert main(["plan", "/nowhere"]) == 2
    warning = "warning: environment variables without effect: "
    warning += "KTRANSFORMERS_CACHE_LEN (did you mean KTRANSFORMERS_CACHE_LENS?), KTRANSFORMERS_QQQ\n"
    assert capsys.readouterr().err.startswith(warning + "error: ")


def test_variables_of_kubernetes_are_not_ours(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What containers get beside a service that is called ktransformers."""
    monkeypatch.setenv("KTRANSFORMERS_PORT", "tcp://10.0.0.7:80")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_80_TCP", "PORT_80_TCP_ADDR"):
        monkeypatch.setenv(f"KTRANSFORMERS_{name}", "10.0.0.7")
    assert parse("serve").port == 10002
    assert main(["serve", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: /nowhere does not exist")


def test_lists_and_texts_with_dashes(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ArgumentParser(prog="p")
    parser.add_argument("--some_files", nargs="*", type=Path)
    parser.add_argument("--text")
    config_file.write_text("some-files: [a, b]\n")
    assert parser.parse_args(["--config", str(config_file)]).some_files == [Path("a"), Path("b")]
    monkeypatch.setenv("KTRANSFORMERS_SOME_FILES", "c,d")
    assert parser.parse_args([]).some_files == [Path("c"), Path("d")]
    assert parser.parse_args(["--text", "--well-known as a-b"]).text == "--well-known as a-b"


def test_exclusive_flags_are_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = ArgumentParser(prog="p")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--json", action="store_true")
    group.add_argument("--full", action="store_true")
    monkeypatch.setenv("KTRANSFORMERS_JSON", "1")
    assert parser.parse_args([]).json is True
    args = parser.parse_args(["--full"])
    assert (args.json, args.full) == (False, True)


def test_no_flag_has_the_name_of_another_variable() -> None:
    assert base.ISA_VARIABLE in OTHER_VARIABLES
    flags = {f"KTRANSFORMERS_{name.upper()}" for parser in leaves(build_parser()) for name in parser.settings()}
    assert not flags & OTHER_VARIABLES


@pytest.mark.every(5)
@pytest.mark.parametrize("command", [words for words in COMMANDS if words not in (["completion"], ["help"])])
def test_print_config_can_be_fed_back(
    command: list[str], config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    required = [a for a in build_parser_of(command)._actions if a.required and not a.option_strings]
    words = [*command, *(["x"] * len(required)), "--print_config"]
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 0
    first = capsys.readouterr().out
    config_file.write_text(first)
    with pytest.raises(SystemExit):
        main([*words, "--config", str(config_file)])
    assert yaml.safe_load(capsys.readouterr().out) == yaml.safe_load(first)


def build_parser_of(command: list[str]) -> ArgumentParser:
    return next(parser for parser in leaves(build_parser()) if parser.prog.split()[1:] == command)


def test_print_config_shows_sources_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, config_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config_file.write_text('cors_origins: ["https://a.b", "yes"]\nmodel: "a: b.gguf"\n')
    monkeypatch.setenv("KTRANSFORMERS_API_KEY", "secret-1,secret-2")
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(config_file), "--no-strict", "--print_config"])
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "secret" not in out
    assert "# api_key: hidden  # KTRANSFORMERS_API_KEY" in lines
    assert "strict: false  # command line" in lines
    assert "port: 10002  # default" in lines
    assert f'model: "a: b.gguf"  # {config_file} line 2' in lines
    assert yaml.safe_load(out)["cors_origins"] == ["https://a.b", "yes"]
    assert {"api_key"} <= SECRETS


@pytest.mark.parametrize("command", [[], ["bench"], *COMMANDS])
def test_help_fits_80_columns(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["help", *command])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: {' '.join(['ktransformers', *command])}")
    assert max(map(len, lines)) <= 80


def test_help_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in dict.fromkeys(words[0] for words in COMMANDS):
        assert f"\n    {name} " in out
    assert out.count("\n  ktransformers ") == 2  # examples
    server = server_parser().format_help()
    assert server.startswith("usage: main.py [options] [MODEL]\n")
    assert "\n  --[no_]use_cuda_graph\n" in server
    assert local_chat_parser().format_help().startswith("usage: local_chat.py [options]")


def model_parser() -> ArgumentParser:
    parser = ArgumentParser(prog="p")
    add_model_argument(parser)
    add_plan_flags(parser)
    return parser


def test_model_beside_its_flags(tmp_path: Path) -> None:
    file, folder, plain = tmp_path / "a.gguf", tmp_path / "folder", tmp_path / "plain"
    file.touch()
    folder.mkdir()
    plain.mkdir()
    (folder / "config.json").write_text('{"architectures": ["A"]}')
    cases: list[tuple[list[Path | str], tuple[Path | None, Path | None]]] = [
        ([], (None, None)),
        ([file], (None, file)),
        (["-m", folder], (folder, None)),
        ([plain], (None, plain)),
        ([file, "--model_path", folder], (folder, file)),
        ([folder, "--model_path", plain], (plain, folder)),  # weights in safetensors beside another config
        ([folder, "--gguf_path", file], (folder, file)),
        ([plain, "--gguf_path", file], (plain, file)),
        (["--model_path", folder, "--gguf_path", file], (folder, file)),
    ]
    for words, files in cases:
        args = model_parser().parse_args([str(word) for word in words])
        assert model_files(args) == files
        config = engine_config(args)
        assert (config.model_path, config.gguf_path) == files
    with pytest.raises(ConfigError, match="MODEL, --model_path and --gguf_path together"):
        engine_config(model_parser().parse_args([str(file), "--model_path", str(folder), "--gguf_path", str(file)]))


def test_architectures_may_agree_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3MoeForCausalLM"]}')
    for words in (["Qwen3MoeForCausalLM"], ["Other"]):
        args = parse("serve", str(tmp_path), "--architectures", *words)
        if words == ["Other"]:
            with pytest.raises(ConfigError, match=r"--architectures Other: .* says Qwen3MoeForCausalLM; leave it out"):
                engine_config(args)
        else:
            assert engine_config(args).model_path == tmp_path
    assert engine_config(parse("serve", "--architectures", "Other")).model_path is None


def test_prefix_cache_of_every_command_that_generates() -> None:
    for parser in (server_parser(), local_chat_parser()):
        assert engine_config(parser.parse_args(["--no_prefix_cache"])).prefix_cache is False
        assert engine_config(parser.parse_args([])).prefix_cache is True
