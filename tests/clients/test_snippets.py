"""The snippets of docs/use_with.md: programs are run, configurations given to theirs, against a real service.

Which program a snippet is for is said by the heading above it; only address, port and the context's length are changed.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.servers.server_process import ServerProcess

PAGE = Path(__file__).parents[2] / "docs" / "use_with.md"
SECONDS = 120.0  # for a busy machine; each takes two to ten
TEXT = "17 + 25 = 42."
SAID = "It is 18 degrees and sunny in Paris."
QUESTION = "What is 17 + 25?"

run = [pytest.mark.exhaustive, pytest.mark.slow]

SNIPPETS: dict[tuple[str, str], str] = {}
"""By heading and language of the fence."""
for section in re.split(r"(?m)^##+ ", PAGE.read_text(encoding="utf-8"))[1:]:
    for language, body in re.findall(r"(?ms)^```(\w+)\n(.*?)^```$", section):
        SNIPPETS[section.partition("\n")[0], language] = body

PYTHON = {  # heading: the environment, what is printed
    "OpenAI's SDK": ("agents", TEXT),
    "Anthropic's SDK": ("agents", SAID),
    "LangChain": ("agents", TEXT),
    "pydantic-ai": ("agents", TEXT),
    "OpenAI's Agents SDK": ("agents", TEXT),
    "litellm": ("gateways", TEXT),
    "LlamaIndex": ("gateways", TEXT),
}
JS = {"OpenAI's SDK": TEXT, "Anthropic's SDK": SAID, "LangChain": TEXT, "AI SDK": SAID}
CONFIGURATIONS = {
    ("Codex CLI", "toml"),
    ("Continue", "yaml"),
    ("Zed", "json"),
    ("litellm", "yaml"),
}
SHELL = {"Claude Code", "Cline, Roo Code", "aider", "Open WebUI"}


def test_every_snippet_is_looked_at() -> None:
    known = {(name, "python") for name in PYTHON} | {(name, "js") for name in JS} | {(name, "sh") for name in SHELL}
    assert set(SNIPPETS) == known | CONFIGURATIONS


def addresses(value: Any) -> list[str]:
    if isinstance(value, dict | list):
        return [url for one in (value.values() if isinstance(value, dict) else value) for url in addresses(one)]
    return [value] if isinstance(value, str) and value.startswith("http") else []


@pytest.mark.parametrize(("heading", "language"), sorted(CONFIGURATIONS))
def test_a_configuration_is_one_and_has_the_address(heading: str, language: str) -> None:
    read = {"toml": tomllib.loads, "yaml": yaml.safe_load, "json": json.loads}[language]
    assert addresses(read(SNIPPETS[heading, language])) == ["http://127.0.0.1:10002/v1"]


@pytest.mark.parametrize("heading", sorted(SHELL))
def test_a_command_has_the_address(heading: str) -> None:
    wanted = "http://127.0.0.1:10002" if heading == "Claude Code" else "http://127.0.0.1:10002/v1"
    assert re.findall(r"https?://[\w.:/]+", SNIPPETS[heading, "sh"]) == [wanted]
    subprocess.run(["bash", "-n", "-c", SNIPPETS[heading, "sh"]], check=True)


def here(snippet: str, service: ServerProcess) -> str:
    return snippet.replace("http://127.0.0.1:10002", service.url)


def done(command: list[str], folder: Path, **settings: str) -> subprocess.CompletedProcess[str]:
    """Without the variables and files of who runs the tests, in whose place programs would take keys and settings."""
    env = {"PATH": os.environ["PATH"], "HOME": str(folder), **settings}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        check=False,
    )


class TestRun:
    pytestmark = run

    @pytest.mark.parametrize("heading", PYTHON)
    def test_python(
        self, heading: str, service: ServerProcess, interpreter_of: Callable[..., Path], tmp_path: Path
    ) -> None:
        environment, wanted = PYTHON[heading]
        command = [str(interpreter_of(environment)), "-c", here(SNIPPETS[heading, "python"], service)]
        got = done(command, tmp_path, LITELLM_LOCAL_MODEL_COST_MAP="True")
        assert got.stdout.strip() == wanted, got.stderr

    @pytest.mark.parametrize("heading", JS)
    def test_js(self, heading: str, service: ServerProcess, modules_of: Callable[[str], Path], tmp_path: Path) -> None:
        (tmp_path / "node_modules").symlink_to(modules_of("js"))
        (tmp_path / "snippet.mjs").write_text(here(SNIPPETS[heading, "js"], service), encoding="utf-8")
        got = done(["node", "snippet.mjs"], tmp_path)
        assert got.stdout.strip() == JS[heading], got.stderr

    @pytest.mark.parametrize(
        ("path", "field"), [("/v1/models", "data"), ("/api/tags", "models"), ("/api/version", "version")]
    )
    def test_routes_of_open_webui(self, path: str, field: str, service: ServerProcess) -> None:
        with urllib.request.urlopen(service.url + path) as response:
            assert json.load(response)[field]


class TestAgents:
    """Their own instructions are longer than the bundled model's context: first short ones, then theirs."""

    pytestmark = run

    @pytest.fixture
    def programs(self, modules_of: Callable[[str], Path]) -> Path:
        return modules_of("js/agents") / ".bin"

    def claude(self, service: ServerProcess, programs: Path, folder: Path, more: str) -> str:
        # What starts it where the scripts of packages did not run.
        program = programs.parent / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
        lines = here(SNIPPETS["Claude Code", "sh"], service).replace("claude -p", f"node '{program}' {more} -p")
        return done(["bash", "-c", lines], folder).stdout.strip()

    def test_claude_code(self, service: ServerProcess, programs: Path, tmp_path: Path) -> None:
        more = '--system-prompt "You answer." --tools ""'
        assert self.claude(service, programs, tmp_path, more) == TEXT

    def test_claude_code_knows_that_the_context_is_full(
        self, service: ServerProcess, programs: Path, tmp_path: Path
    ) -> None:
        assert "Prompt is too long" in self.claude(service, programs, tmp_path, "")

    def codex(
        self, service: ServerProcess, programs: Path, folder: Path, more: str, *flags: str
    ) -> subprocess.CompletedProcess[str]:
        (folder / ".codex").mkdir()
        text = more + here(SNIPPETS["Codex CLI", "toml"], service)
        (folder / ".codex" / "config.toml").write_text(text, encoding="utf-8")
        command = [str(programs / "codex"), "exec", "--strict-config", "--skip-git-repo-check", *flags, QUESTION]
        return done(command, folder)

    def test_codex(self, service: ServerProcess, programs: Path, tmp_path: Path) -> None:
        short = tmp_path / "instructions.md"
        short.write_text("You answer.", encoding="utf-8")
        more = f'model_instructions_file = "{short}"\n' + "".join(
            f"include_{what} = false\n"
            for what in ("permissions_instructions", "apps_instructions", "environment_context")
        )
        flags = ["--disable", "multi_agent", "--disable", "goals", "-c", "skills.include_instructions=false"]
        got = self.codex(service, programs, tmp_path, more, *flags)
        assert got.stdout.strip() == TEXT, got.stderr

    def test_codex_knows_that_the_context_is_full(self, service: ServerProcess, programs: Path, tmp_path: Path) -> None:
        assert "ran out of room in the model's context window" in self.codex(service, programs, tmp_path, "").stderr

    def test_continue(self, service: ServerProcess, programs: Path, tmp_path: Path) -> None:
        config = tmp_path / "config.yaml"
        config.write_text(here(SNIPPETS["Continue", "yaml"], service), encoding="utf-8")
        command = [str(programs / "cn"), "-p", QUESTION, "--config", str(config), "--exclude", "*"]
        got = done(command, tmp_path, CONTINUE_TELEMETRY_ENABLED="0")
        assert got.stdout.strip() == TEXT, got.stderr
