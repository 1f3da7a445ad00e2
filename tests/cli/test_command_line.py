"""The command line itself: what it imports, its entry points, its usage errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ktransformers
from ktransformers.cli import build_parser
from ktransformers.cli.parsing.options import ArgumentParser, add_toggle, engine_config
from ktransformers.config import EngineConfig

PACKAGE = Path(ktransformers.__file__).parent
ENVIRONMENT = os.environ | {"PYTHONPATH": str(PACKAGE.parent)}


def python(*args: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, env=ENVIRONMENT, cwd=cwd, timeout=120, check=False
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom ktransformers.cli import main\n"
        "try:\n    main(['chat', '--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'numpy', 'rich', 'gguf'} & set(sys.modules)\nassert not heavy, heavy"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "--optimize_config_path" in done.stdout


@pytest.mark.parametrize("entry", [["-m", "ktransformers"], ["-m", "ktransformers.cli"]])
def test_entry_points(entry: list[str]) -> None:
    assert "doctor" in python(*entry, "--help").stdout
    assert python(*entry, "--version").stdout.startswith("ktransformers ")
    usage = python(*entry, "chat", "--modelpath", "x")
    assert usage.returncode == 2
    assert (
        usage.stderr
        == "error: unknown argument --modelpath; did you mean --model_path? (see ktransformers chat --help)\n"
    )
    assert python(*entry).returncode == 2


def test_local_chat_runs_as_a_file_from_anywhere(tmp_path: Path) -> None:
    """Its folder must not stand on sys.path: `import tokenizer` would find ours."""
    for cwd in (tmp_path, PACKAGE, PACKAGE.parent):
        done = python(str(PACKAGE / "local_chat.py"), "--help", cwd=cwd)
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: local_chat.py")
    missing = python(str(PACKAGE / "local_chat.py"), "--model_path", str(tmp_path / "none"))
    assert (missing.returncode, missing.stdout) == (2, "")
    assert missing.stderr.startswith("error: --model_path ")


def test_local_chat_fixes_the_path(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.path.insert(0, {str(PACKAGE)!r})\nsys.argv = ['local_chat.py', '--help']\n"
        f"path = {str(PACKAGE / 'local_chat.py')!r}\n"
        "try:\n    runpy.run_path(path, run_name='__main__')\nexcept SystemExit:\n    pass\n"
        f"assert {str(PACKAGE)!r} not in sys.path\n"
        "import importlib.util\nassert importlib.util.find_spec('kernels') is None\n"
    )
    done = python("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_flags_become_the_configuration(tmp_path: Path) -> None:
    flags = f"--model-path {tmp_path} --gguf_path={tmp_path} --optimize_config-path /o --cache-lens 9 --chunk_size 8192"
    flags += " --cpu_infer 3"
    args = build_parser().parse_args(
        [
            "chat",
            *flags.split(),
            "--cpu-quant",
            "q8_0",
            "--cpu-prefill",
            "bf16",
            "--cpu-bf16",
            "fp32",
            "--strict",
            "--no-force-think",
        ]
    )
    assert engine_config(args) == EngineConfig(
        model_path=tmp_path,
        gguf_path=tmp_path,
        optimize_config_path=Path("/o"),
        cache_lens=9,
        chunk_size=8192,
        max_new_tokens=1000,
        cpu_infer=3,
        cpu_quant="q8_0",
        cpu_prefill="bf16",
        cpu_bf16="fp32",
        strict=True,
    )
    assert args.force_think is False
    assert args.use_cuda_graph is None
    without = build_parser().parse_args(["serve", *flags.split(), "--no-use_cuda_graph"])
    assert engine_config(without).use_cuda_graph is False


def test_values_keep_their_hyphens(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser(prog="p")
    parser.add_argument("--some_flag")
    add_toggle(parser, "on_off", default=True, help="")
    assert parser.parse_args(["--some-flag=a-b", "--no-on-off"]).some_flag == "a-b"
    assert parser.parse_args(["--some-flag", "a-b"]).some_flag == "a-b"
    assert parser.parse_args(["--no-on_off"]).on_off is False
    with pytest.raises(SystemExit) as caught:
        parser.parse_args(["--some", "x"])  # no abbreviations
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: unknown argument --some; did you mean --some_flag? (see p --help)\n"
