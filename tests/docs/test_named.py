"""Files and modules that docs, comments and docstrings name exist."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import pytest

from ktransformers.optimize.aliases import OPERATOR_ALIASES
from tests.docs.named import ROOT, Files, dotted_names, file_names, missing_dotted, pages, prose_of, sources

ELSEWHERE = {
    # llama.cpp's, as a program and as sources
    "llama.cpp",
    "ik_llama.cpp",
    "ggml.h",
    "ggml-alloc.h",
    "ggml-backend.h",
    "ggml-common.h",
    "ggml-quants.h",
    "include/ggml.h",
    "iqk_quantize.cpp",
    "llama.h",
    "include/llama.h",
    "llama-arch.cpp",
    # Ollama's, transformers', vLLM's, Kimi's
    "llama/compat/llama-ollama-compat.cpp",
    "integrations/finegrained_fp8.py",
    "vllm/entrypoints/openai/api_server.py",
    "tokenization_kimi.py",
    # Continue's, and upstream's rule files that docs/rules.md says are missing here
    "config.yaml",
    "DeepSeek-V3-Chat-multi-gpu-8.yaml",
    "Moonlight-16B-A3B-serve.yaml",
    "Qwen3Moe-serve-amx.yaml",
    # what stands for a user's file, and one that an error message shows misspelled
    "FILE.yaml",
    "NAME.yaml",
    "my.yaml",
    "default-mo.yaml",
}
PLACEHOLDERS = {
    "ktransformers.env",  # a file of systemd's
    "ktransformers.fish",  # a file of the shell's
    "ktransformers.models.modeling_X.Y",
    "ktransformers.models.modeling_deepseek.DeepseekV2MoE",  # upstream's name of transformers' class
    "ktransformers.operators.linear.KTransformersLiner",  # an error message shows it
}
TRACES = re.compile(r"ktransformers\.(?:answer|(?:prefill|chunk|decode|step|request)\.\w+)$")  # attributes of spans


def missing(paths: Iterable[Path], files: Files) -> dict[str, list[str]]:
    """{name: where it is said} of files and modules that there are not."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        for line, text in prose_of(path):
            names = [name for name in file_names(text) if name not in ELSEWHERE and not files.has(name)]
            names += [name for name in dotted_names(text) if is_stale(name)]
            for name in names:
                found[name].append(f"{path.name}:{line}")
    return dict(found)


def is_stale(name: str) -> bool:
    known = name in PLACEHOLDERS or name in OPERATOR_ALIASES or TRACES.match(name)
    return not known and missing_dotted(name)


def test_pages_name_files_and_modules_that_exist() -> None:
    assert len(pages()) > 20
    assert missing(pages(), Files.of_repository()) == {}


def test_comments_name_files_and_modules_that_exist() -> None:
    assert len(sources()) > 1000
    assert missing(sources(), Files.of_repository()) == {}


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".md", "The loop is `engine/step/nowhere.py`, see ktransformers.engine.step.nowhere.\n"),
        (".h", "int x;  // as engine/step/nowhere.py has it, or ktransformers.engine.step.nowhere\n"),
        (".py", '"""Of engine/step/nowhere.py."""\n\nX = 1  MARK see ktransformers.engine.step.nowhere\n'),
    ],
)
def test_what_is_gone_is_found(suffix: str, text: str, tmp_path: Path) -> None:
    page = tmp_path / f"page{suffix}"
    page.write_text(text.replace("MARK", "#"), encoding="utf-8")
    assert set(missing([page], Files.of_repository())) == {
        "engine/step/nowhere.py",
        "ktransformers.engine.step.nowhere",
    }


def test_what_is_there_is_known(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "step/runner.py, `docs/rules.md`, pool.cpp, https://example.com/gone.py, `*.yaml`, ktransformers.LLM,\n"
        "ktransformers.engine.step.runner.ModelRunner, ktransformers.kernels.triton\n",
        encoding="utf-8",
    )
    assert missing([page], Files.of_repository()) == {}


def test_exceptions_are_said_somewhere() -> None:
    """So that the lists do not outlive what they are for."""
    said = {name for path in [*pages(), *sources()] for _, text in prose_of(path) for name in file_names(text)}
    assert said >= ELSEWHERE
    dotted = {name for path in [*pages(), *sources()] for _, text in prose_of(path) for name in dotted_names(text)}
    assert dotted >= PLACEHOLDERS


def test_the_repository_is_this_one() -> None:
    assert (ROOT / "ktransformers" / "__init__.py").exists()
