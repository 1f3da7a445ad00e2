"""One prompt from the command line or from a pipe, and where the model's name stands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ktransformers.cli import build_parser
from ktransformers.cli.parsing.options import engine_config, with_default_model
from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.errors import ConfigError
from tests.support.servers.fake_chat import Chat


def test_a_pipe_is_one_prompt(chat: Chat) -> None:
    document = "def f():\n    return 1\n\n/help\n@fake\nexit\n"
    for command in ("chat", "run"):
        out, err = chat("\n" + document + "\n\n", command)
        assert out == "you said " + document
        assert err.count("prompt eval: ") == 1


def test_indentation_and_line_ends_of_a_document(chat: Chat) -> None:
    assert chat("    a\r\n    b\r\n", "chat")[0] == "you said     a\n    b\n"


def test_lines_are_turns_on_demand(chat: Chat) -> None:
    assert chat("a\ncount\nexit\n/bye\nnever\n", "chat", "--lines")[0] == "you said a\n2 turns\nyou said exit\n"
    assert chat("a\nb\n", "--no_lines")[0] == "you said a\nb\n"  # local_chat.py


def test_an_empty_pipe_is_said(chat: Chat, tmp_path: Path) -> None:
    out, err = chat(" \n\n", "chat")
    assert out == ""
    assert err.endswith("...\nWARNING ktransformers.cli.chat.input: standard input is empty, so there is no prompt\n")
    prompt = tmp_path / "p"
    prompt.write_text("hi")
    out, err = chat("", "chat", "--prompt_file", str(prompt))
    assert out == "you said hi\n"
    assert "WARNING" not in err


def test_files_that_a_pipe_names_are_not_attached_and_that_is_said(chat: Chat, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    out, err = chat(f"what is @{tmp_path}/notes.txt?\n", "chat")
    assert out == f"you said what is @{tmp_path}/notes.txt?\n"
    assert "files named with @ are attached to -p PROMPT and to --lines" in err
    assert "attached" not in chat("what is @gone.txt, a@b.c?\n", "chat")[1]


def test_prompt_file_and_then_the_pipe(chat: Chat, tmp_path: Path) -> None:
    prompt = tmp_path / "p"
    prompt.write_text("from a file")
    assert chat("count\n", "chat", "--prompt_file", str(prompt))[0] == "you said from a file\n2 turns\n"


@pytest.mark.parametrize("flags", [("-p", "what is it?"), ("--prompt=what is it?",)])
def test_the_prompt_of_a_flag(chat: Chat, flags: tuple[str, ...]) -> None:
    assert chat("", "chat", *flags)[0] == "you said what is it?\n"
    assert chat("a\n```\nb\n", "chat", *flags)[0] == "you said what is it?\n\n````\na\n```\nb\n````\n"


def test_a_prompt_is_no_command_and_no_path(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("x")
    assert chat("", "chat", "-p", "/exit")[0] == "you said /exit\n"
    assert chat("", "chat", "-p", str(file))[0] == f"you said {file}\n"
    out, err = chat("", "chat", "-p", f"sum up @{file}")
    assert out == f"you said sum up @{file}\n\n{file}:\n```txt\nx\n```\n"
    assert f"attached {file}, 1 line, 1 character" in err


def test_errors_of_one_prompt(chat: Chat) -> None:
    assert chat("", "chat", "-p", " ", code=2)[1] == "error: --prompt is empty; it must be the text of a prompt\n"
    assert "leave --lines or --prompt out" in chat("", "chat", "--lines", "-p", "x", code=2)[1]
    err = chat("x" * 200, "chat", "--cache_lens", "96", code=1)[1]
    assert "maximum context length is 96 tokens (set by --cache_lens)" in err
    assert "start with a larger --cache_lens" in err
    assert "/clear" not in err  # nobody can type it


def test_a_pipe_that_is_too_much(chat: Chat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.cli.chat.input._MAX_FILE_BYTES", 5)
    assert chat("12345", "chat")[0] == "you said 12345\n"
    assert "standard input has more than" in chat("123456", "chat", code=1)[1]
    assert "standard input has more than" in chat("123456", "chat", "-p", "x", code=1)[1]


def test_log_level(chat: Chat) -> None:
    assert "cores" not in chat("hi", "chat")[1]
    assert "INFO ktransformers.cli.chat.command: " in chat("hi", "chat", "--log_level", "info")[1]


def test_history_variable(chat: Chat, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("KTRANSFORMERS_HISTORY", "perhaps")
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(["chat"])
    assert caught.value.code == 2
    assert "KTRANSFORMERS_HISTORY: --history is on or off: true or false, not 'perhaps'" in capsys.readouterr().err
    monkeypatch.setenv("KTRANSFORMERS_HISTORY", "0")
    assert chat("hi", "chat", "--no-history")[0] == "you said hi\n"


def test_where_the_model_goes(tmp_path: Path) -> None:
    def places(*flags: object) -> tuple[Path | None, Path | None]:
        config = with_default_model(engine_config(build_parser().parse_args(["chat", *map(str, flags)])))
        return config.model_path, config.gguf_path

    gguf, folder = tmp_path / "m.gguf", tmp_path / "hf"
    gguf.touch()
    folder.mkdir()
    (folder / "config.json").touch()
    assert places(gguf) == (None, gguf)
    assert places(folder) == (folder, None)
    assert places(gguf, "--model_path", folder) == (folder, gguf)
    assert places(folder, "--gguf_path", gguf) == (folder, gguf)
    assert places()[1] is not None
    with pytest.raises(ConfigError, match="too much"):
        places(gguf, "--model_path", folder, "--gguf_path", gguf)
    with pytest.raises(ConfigError, match="does not exist"):
        places(tmp_path / "none")


def test_two_prompts_are_too_many(chat: Chat, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    assert chat("", "run", str(file), "a", "-p", "b", code=2)[1].startswith("error: there are two prompts")


def test_the_bundled_model_answers_a_document() -> None:
    """The whole command: what a pipe has is one question, and only the answer is on standard output."""
    model = next(DEMO_MODEL_PATH.glob("*.gguf"))
    done = subprocess.run(
        [sys.executable, "-m", "ktransformers", "run", str(model), "--temperature=0", "--no_use_cuda"],
        input="What is\n17 + 25?\n",
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "17 + 25 = 42.\n"), done.stderr
    assert "INFO" not in done.stderr
