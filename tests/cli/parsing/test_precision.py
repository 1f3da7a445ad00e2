"""--precision stands for the flags about what is rounded; what is given itself wins, wherever it stands."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ktransformers.cli import build_parser
from ktransformers.cli.parsing.options import engine_config
from ktransformers.config import PRECISIONS, EngineConfig
from ktransformers.engine.api.llm_options import llm_options
from ktransformers.errors import ConfigError

DEFAULTS = EngineConfig()
CLOSE = {"cpu_activations": "int16", "cpu_bf16": "fp32", "kv_type": "fp32", "attention_products": "bf16"}
FAST = {"cpu_activations": "int8", "cpu_bf16": "bf16", "kv_type": "bf16", "attention_products": "kv"}


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(words)


def fields(config: EngineConfig) -> dict[str, str]:
    return {name: getattr(config, name) for name in CLOSE}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CLOSE, "cpu_prefill", "precision"):
        monkeypatch.delenv(f"KTRANSFORMERS_{name.upper()}", raising=False)


def test_exact_is_the_default() -> None:
    assert next(iter(PRECISIONS)) == "exact"
    assert all(getattr(DEFAULTS, name) == value for name, value in PRECISIONS["exact"].items())
    for values in PRECISIONS.values():
        assert set(values) == {*CLOSE, "cpu_prefill"}
        EngineConfig(gguf_path=Path(__file__), **values)._check_choices()  # no choice excludes another


@pytest.mark.parametrize("command", ["chat", "serve", "bench offline"])
@pytest.mark.parametrize(("precision", "expected"), [("close", CLOSE), ("fast", FAST)])
def test_a_word_for_all(command: str, precision: str, expected: dict[str, str]) -> None:
    assert fields(engine_config(parse(*command.split(), "--precision", precision))) == expected


@pytest.mark.parametrize(
    "words", [("--kv_type", "int8", "--precision", "close"), ("--precision", "close", "--kv_type=int8")]
)
def test_a_flag_that_is_given_wins(words: tuple[str, ...]) -> None:
    assert fields(engine_config(parse("chat", *words))) == {**CLOSE, "kv_type": "int8"}


def test_a_default_that_is_given_wins_too() -> None:
    config = engine_config(parse("chat", "--cpu_activations", "int8", "--precision", "close"))
    assert config.cpu_activations == "int8"


def test_variables_and_files_win_and_may_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KTRANSFORMERS_PRECISION", "fast")
    monkeypatch.setenv("KTRANSFORMERS_CPU_BF16", "fp32")
    file = tmp_path / "flags.yaml"
    file.write_text("precision: close\nattention_products: bf16\n")
    args = parse("serve", "--config", str(file))
    assert fields(engine_config(args)) == {**FAST, "cpu_bf16": "fp32", "attention_products": "bf16"}
    assert args.value_sources["kv_type"] == "--precision fast"


def test_a_command_has_some_of_the_flags() -> None:
    args = parse("plan", "MODEL", "--precision", "fast")
    assert (args.kv_type, args.attention_products) == ("bf16", "kv")
    assert not hasattr(args, "cpu_bf16")


def test_another_word(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("chat", "--precision", "best")
    assert "exact" in capsys.readouterr().err


def test_llm() -> None:
    assert fields(llm_options(None, None, None, {"precision": "close"}).config) == CLOSE
    config = llm_options(
        None, None, None, {"precision": "fast", "kv_type": "bf16", "attention_products": "bf16"}
    ).config
    assert fields(config) == {**FAST, "attention_products": "bf16"}
    with pytest.raises(ConfigError, match="'best' is not one of exact, fast, close"):
        llm_options(None, None, None, {"precision": "best"})


@pytest.mark.parametrize(
    ("words", "left_out"),
    [
        (("--precision", "fast", "--kv_type", "int8"), "attention_products"),
        (("--precision", "fast", "--kv_type", "fp32"), "attention_products"),
        (("--precision", "close", "--cpu_prefill", "bf16"), "cpu_activations"),
    ],
)
def test_what_excludes_a_flag_that_is_given_is_left_out(words: tuple[str, ...], left_out: str) -> None:
    config = engine_config(parse("chat", *words))
    assert getattr(config, left_out) == getattr(DEFAULTS, left_out)
    config._check_choices()
