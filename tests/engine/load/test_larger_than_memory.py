"""Experts that do not fit into the memory of a control group: answers as with all of them in RAM, within the limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.disk.control_group import ControlGroup
from benchmarks.disk.counters import drop_cache
from benchmarks.disk.model_file import ModelFile, write_model
from ktransformers.errors import UnsupportedError
from ktransformers.kernels.types import QuantType
from tests.support.models.tiny_models import tiny_config

pytestmark = pytest.mark.slow

GIB = 1 << 30
HIDDEN, WIDTH, EXPERTS, LAYERS, VOCAB = 512, 512, 64, 8, 1024

ANSWERS = """
import json, logging, sys
from ktransformers import LLM

logging.basicConfig(level=logging.INFO)
if __name__ == "__main__":
    path, options = sys.argv[1], json.loads(sys.argv[2])
    prompts = [[7 * i % 1024 for i in range(length)] for length in (3, 90, 300)]
    with LLM(path, cpu_infer=2, cache_lens=1024, chunk_size=128, **options) as llm:
        found = llm.generate(prompts, temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
        again = llm.generate(prompts[0], temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
        status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    said = [[one.outputs[0].token_ids, [at.logprob for at in one.outputs[0].logprobs]] for one in found + again]
    io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    print("said " + json.dumps([said, int(io["read_bytes"]), 1024 * int(status["RssAnon"].split()[0])]))
"""


@dataclass
class Run:
    """A program that answered in a group, or was killed (said None). read: bytes from disks; held: of no file, when it
    had answered; peak: of the group, files in the system's cache included."""

    said: Any
    read: int
    held: int
    peak: int
    oom_kills: int
    error: str


def run(path: Path, limit: int, **options: object) -> Run:
    drop_cache(path)
    with ControlGroup(limit) as group:
        command = group.command(sys.executable, "-c", ANSWERS, str(path), json.dumps(options))
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        lines = [line for line in done.stdout.splitlines() if line.startswith("said ")]
        said, read, held = json.loads(lines[0].removeprefix("said ")) if lines else (None, 0, 0)
        return Run(said, read, held, group.peak(), group.oom_kills(), done.stderr)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, int]]:
    """A file on a disk, and the bytes of its experts."""
    try:
        with ControlGroup(GIB):
            pass
    except UnsupportedError as error:
        pytest.skip(str(error))
    config = tiny_config(
        "qwen3_moe",
        hidden=HIDDEN,
        layers=LAYERS,
        moe_intermediate_size=WIDTH,
        num_experts=EXPERTS,
        num_experts_per_tok=4,
        max_position_embeddings=1024,
        vocab_size=VOCAB,
    )
    path = tmp_path_factory.mktemp("larger") / "model.gguf"
    layout = write_model(ModelFile(path, config, QuantType.Q8_0))
    yield path, sum(one.nbytes for one in layout.tensors if "_exps" in one.name)
    path.unlink()


def test_answers_are_those_of_experts_in_ram(model: tuple[Path, int]) -> None:
    """The limit is what the program holds with all of them, less half of the experts, which there is no room for."""
    path, experts = model
    inside = run(path, 8 * GIB, experts_from="ram")
    assert inside.said is not None, inside.error
    limit = (inside.held - experts // 2) // 4096 * 4096
    refused = run(path, limit, experts_from="ram")
    assert refused.said is None
    assert "does not fit" in refused.error

    slots = experts / 4 / GIB
    outside = run(path, limit, experts_from="disk", experts_ram=slots)
    assert outside.said == inside.said, outside.error
    assert outside.oom_kills == 0
    assert outside.held <= inside.held - experts // 2
    assert outside.peak <= limit
    assert outside.read > experts  # three prompts touch all of them, and a quarter stays

    by_itself = run(path, limit, experts_ram=slots)  # what does not fit goes to the disk, and a line says so
    assert by_itself.said == inside.said, by_itself.error
    assert by_itself.oom_kills == 0
    assert "of experts stay on the disk" in by_itself.error
