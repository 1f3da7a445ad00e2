"""Programs that people build on other libraries, against a real service: each case gets the right answer.

Each program runs once and says what all of its cases got. The bundled model answers the questions of
programs/cases.py the same way through every dialect, streamed or not. Programs in JavaScript are in js/programs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.server_process import ServerProcess

pytestmark = [pytest.mark.exhaustive, pytest.mark.slow]

PROGRAMS = Path(__file__).parent / "programs"
JS_PROGRAMS = Path(__file__).parent / "js" / "programs"
PROGRAM_SECONDS = 120.0  # for a busy machine; each takes two to eight

TEXT = "17 + 25 = 42."
COUNTED = " 4, 5, 6, 7,"
CALL = ["get_weather", {"city": "Paris"}]
SAID = "It is 18 degrees and sunny in Paris."
PERSON = {"name": "Anna", "age": 31, "city": "Paris"}
RAN = CALL[1]  # what a tool that a library runs is given


def of_each(names: tuple[str, ...], cases: dict[str, Any]) -> dict[str, Any]:
    return {f"{name} {case}".rstrip(): wanted for name in names for case, wanted in cases.items()}


EXPECTED: dict[tuple[str, str], dict[str, Any]] = {
    ("agents", "langchain_openai"): of_each(
        ("chat", "responses"),
        {"text": [TEXT, 12], "stream": [TEXT, 12], "loop": [CALL, SAID], "streamed loop": [CALL, SAID]}
        | {"named": "get_weather", "json_schema": PERSON, "json_mode": PERSON, "function_calling": PERSON},
    ),
    ("agents", "pydantic_ai"): of_each(
        ("chat", "responses", "anthropic"),
        {"text": TEXT, "stream": TEXT, "loop": [CALL, SAID], "streamed_loop": SAID}
        | {"ToolOutput": PERSON, "NativeOutput": PERSON, "PromptedOutput": PERSON},
    ),
    ("agents", "openai_agents"): of_each(
        ("chat", "responses"),
        {"text": TEXT, "stream": TEXT, "loop": [CALL, SAID], "streamed_loop": [CALL, SAID]}
        | {"required": "get_weather", "schema": PERSON},
    ),
    ("agents", "anthropic"): {"text": TEXT, "stream": TEXT, "parsed": PERSON, "cut runner": "max_tokens"}
    | of_each(("runner", "streamed runner", "async runner", "async streamed runner"), {"": [RAN, SAID]}),
    ("agents", "cut_calls"): {"ollama": ["length", True]}  # which has no place for half an object
    | of_each(("chat", "streamed chat"), {"": ["length", "get_weather", True]})
    | of_each(("responses", "streamed responses"), {"": ["incomplete", "max_output_tokens", "get_weather", True]})
    | of_each(("messages", "streamed messages"), {"": ["max_tokens", "get_weather", True]}),
    ("gateways", "litellm"): {
        "completions": COUNTED,
        "responses": TEXT,
        "openai json_object": PERSON,
        "openai named": "get_weather",
    }
    | of_each(
        ("openai", "hosted_vllm", "anthropic", "ollama_chat"),
        {"text": TEXT, "loop": ["tool_calls", CALL, SAID], "schema": PERSON}
        | {"streamed text": TEXT, "streamed loop": ["tool_calls", CALL, SAID], "streamed schema": PERSON},
    )
    | of_each(
        ("openai", "hosted_vllm", "anthropic"),
        {f"{how}too_long": "ContextWindowExceededError" for how in ("", "streamed ")},
    ),
    ("gateways", "llama_index"): {
        "chat": TEXT,
        "streamed chat": TEXT,
        "async chat": TEXT,
        "complete": COUNTED,
        "streamed complete": COUNTED,
        "loop": [CALL, SAID],
        "streamed call": [CALL],
        "structured by tool": PERSON,
        "structured by schema": PERSON,
    },
    ("js", "ai_sdk"): {"text": TEXT, "stream": TEXT, "usage": 12, "loop": [CALL, SAID], "streamed loop": [CALL, SAID]}
    | {"cut loop": ["length", True], "forced record": ["as_record", False], "required of 24": 1}
    | {"object": PERSON, "object with record": PERSON},
    ("js", "langchain"): of_each(
        ("chat", "responses"),
        {"text": TEXT, "stream": TEXT, "loop": [CALL, SAID], "cut": "string", "named": "get_weather"}
        | {"jsonSchema": PERSON, "functionCalling": PERSON, "jsonMode": PERSON}
        | {"functionCalling of a record": PERSON},
    )
    | {"chat jsonSchema of a record": "object"},
    ("js", "anthropic_sdk"): {"text": TEXT, "stream": TEXT, "tool runner": [RAN, SAID], "any": "get_weather"}
    | {"streamed tool runner": [RAN, SAID], "cut tool runner": ["max_tokens", "message"]},
    ("js", "openai_sdk"): {"text": TEXT, "responses": TEXT, "run tools": [RAN, SAID]}
    | {"streamed run tools": [RAN, SAID], "chat parse": PERSON, "responses parse": PERSON},
}

Report = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reports(
    service: ServerProcess,
    interpreter_of: Callable[..., Path],
    modules_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str, str], Report]:
    """reports(environment, program): what the program said; it runs when it is first asked for."""
    made: dict[str, Report] = {}

    def program_of(environment: str, program: str) -> list[str]:
        if environment != "js":
            return [str(interpreter_of(environment)), str(PROGRAMS / f"{program}_client.py")]
        folder = tmp_path_factory.mktemp("js")  # node looks for packages beside the program
        (folder / "node_modules").symlink_to(modules_of("js"))
        shutil.copytree(JS_PROGRAMS, folder, dirs_exist_ok=True)
        return ["node", str(folder / f"{program}.mjs")]

    def report(environment: str, program: str) -> Report:
        if program not in made:
            command = [*program_of(environment, program), service.url]
            # litellm would fetch prices, and the agents' SDK send traces.
            settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, env=os.environ | settings, check=False
            )
            assert done.returncode == 0, done.stderr
            made[program] = json.loads(done.stdout.splitlines()[-1])
        return made[program]

    return report


@pytest.mark.parametrize(
    ("environment", "program", "case"),
    [
        pytest.param(*key, case, id=f"{key[1]}-{case.replace(' ', '_')}")
        for key, cases in EXPECTED.items()
        for case in cases
    ],
)
def test_each_case_gets_its_answer(
    reports: Callable[[str, str], Report], environment: str, program: str, case: str
) -> None:
    said = reports(environment, program)[case]
    assert "error" not in said, said["error"]
    assert said["got"] == EXPECTED[environment, program][case]


@pytest.mark.parametrize(("environment", "program"), list(EXPECTED))
def test_every_case_is_looked_at(reports: Callable[[str, str], Report], environment: str, program: str) -> None:
    assert set(reports(environment, program)) == set(EXPECTED[environment, program])
