"""`ktransformers completion`: the scripts, and bash that completes with one of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ktransformers.cli import build_parser, main
from ktransformers.cli.parsing.completion import SHELLS, completion_script

ASK = """
source "$1"
shift
function=$(complete -p ktransformers | sed 's/.*-F \\([^ ]*\\).*/\\1/')
while read -r line; do
  read -ra COMP_WORDS <<< "$line"
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMP_LINE=$line COMP_POINT=${#line} COMPREPLY=()
  "$function" ktransformers "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
  echo "${COMPREPLY[*]}"
done
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
def test_bash_completes(tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(completion_script(build_parser(), "bash"))
    subprocess.run(["bash", "-n", str(script)], check=True)
    (tmp_path / "model.gguf").touch()
    asked = {
        "ktransformers ser": "serve",
        "ktransformers bench ser": "serving",
        "ktransformers serve --cache": "--cache_lens",
        "ktransformers serve --attention_backend f": "flashinfer",
        "ktransformers chat --gguf_path mod": "model.gguf",
        "ktransformers serve mod": "model.gguf",
        "ktransformers completion z": "zsh",
    }
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", str(script)],
        input="\n".join(asked) + "\n",
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""
    assert dict(zip(asked, done.stdout.split("\n"), strict=False)) == asked


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_know_commands_and_flags(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out = capsys.readouterr().out
    for word in ("serve", "offline", "optimize_config_path", "no_use_cuda_graph"):
        assert word in out
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


def test_an_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["completion", "tcsh"])
    assert "invalid choice: 'tcsh'" in capsys.readouterr().err
