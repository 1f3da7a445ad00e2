"""Exit codes: 2 for a command line that is refused, 1 for what fails, 130 for Ctrl-C; the same in every command."""

from __future__ import annotations

import argparse
import inspect

import pytest

from ktransformers import errors
from ktransformers.cli import build_parser, guarded, main
from ktransformers.cli.parsing.exit_codes import exit_code
from ktransformers.cli.parsing.parser import leaves
from ktransformers.errors import ConfigError, KTransformersError

COMMANDS = sorted({parser.prog.removeprefix("ktransformers ") for parser in leaves(build_parser())})

USAGE = {"ConfigError", "PromptError", "UnsupportedError", "RuleError"}
"""All other errors of the tree are failures."""


def code_of(argv: list[str]) -> object:
    try:
        return main(argv)
    except SystemExit as end:
        return end.code


@pytest.mark.every(5)
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("words", [["--no-such-flag"], ["--no-such-flag=1", "x"], ["-zz"], ["a", "b", "c", "--wombat"]])
def test_unknown_flags_of_every_command(command: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([*command.split(), *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")


def values() -> list[tuple[str, str]]:
    return [
        (parser.prog.removeprefix("ktransformers "), action.option_strings[0])
        for parser in leaves(build_parser())
        for action in parser._actions
        if action.type in (int, float) and action.option_strings
    ]


@pytest.mark.every(5)
@pytest.mark.parametrize(("command", "flag"), values())
def test_values_that_are_no_numbers(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of([*command.split(), f"{flag}=many"]) == 2
    assert flag in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "",
        "chta",
        "help wombat",
        "chat /no/such/model.gguf",
        "serve /no/such/model.gguf",
        "plan /no/such/model.gguf",
        "bench offline /no/such/model.gguf",
        "quantize /no/such/model.gguf /tmp/out.gguf",
        "pack /no/such/model.gguf",
        "imatrix /no/such/model.gguf /no/such/text -o /tmp/out.gguf",
        "chat --temperature -1",
        "chat --cpu_infer -1",
        "chat --mode long_context",
        "chat -p a b c",
        "chat --lora x",
        "serve --port 70000",
        "serve --host 999.1.1.1 --port 0",
        "serve --api_key_file /no/such/file",
        "serve --config /no/such/file",
        "serve /no/such/models.yaml",
        "plan --optimize_config_path /no/such/rules.yaml",
        "stage --stage_key_file /no/such/file",
        "profile report /no/such/folder",
        "pull not-a-name",
        "rm org/not-here --yes",
    ],
)
def test_lines_that_are_refused_before_any_work(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(line.split()) == 2, capsys.readouterr().err


ERRORS = [
    kind
    for _, kind in inspect.getmembers(errors, inspect.isclass)
    if issubclass(kind, KTransformersError) and kind is not KTransformersError
]


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_has_its_code(kind: type[KTransformersError]) -> None:
    error = kind.__new__(kind)
    assert exit_code(error) == (2 if kind.__name__ in USAGE else 1)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (OSError(28, "No space left on device"), 1),
        (PermissionError(13, "Permission denied"), 1),
        (ConfigError("x"), 2),
        (errors.CapacityError("x"), 1),
        (errors.ListenError("x"), 1),
    ],
)
def test_what_a_command_raises(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> int:
        raise error

    assert guarded(run, argparse.Namespace()) == code
    capsys.readouterr()
