"""Experts in files whose disk fails: what fails once is read again; else the answer ends with an error that names the
file, and the next one is right.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.disk.model_file import ModelFile, write_model
from ktransformers.kernels.types import QuantType
from tests.support.faults.reads import ReadFaults
from tests.support.models.tiny_models import tiny_config

ANSWERS = """
import json, logging, sys
from ktransformers import LLM
from ktransformers.errors import EngineError

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="logged %(message)s", stream=sys.stdout)
    options = {"cpu_infer": 1, "cache_lens": 128, "experts_from": "disk", "experts_ram": 0.012}
    with LLM(sys.argv[1], **options) as llm:
        for _ in sys.stdin:
            try:
                found = llm.generate([[3, 5, 7, 11, 13] * 8], temperature=0.0, max_tokens=8, ignore_eos=True)
                print("answer " + json.dumps(found[0].outputs[0].token_ids), flush=True)
            except EngineError as error:
                print("answer " + json.dumps(str(error)), flush=True)
"""


def test_an_answer_ends_and_the_next_one_is_right(read_faults: Callable[[Path], ReadFaults], tmp_path: Path) -> None:
    config = tiny_config("qwen3_moe", hidden=256, layers=4, num_experts=32, num_experts_per_tok=4)
    path = tmp_path / "model.gguf"
    write_model(ModelFile(path, config, QuantType.Q8_0))
    faults, pipe = read_faults(path), subprocess.PIPE
    command = [sys.executable, "-c", ANSWERS, str(path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=faults.environment()) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        sent, said, logged = child.stdin, child.stdout, list[str]()

        def ask() -> object:
            sent.write("\n")
            sent.flush()
            for line in said:
                if line.startswith("answer "):
                    break
                logged.append(line)
            return json.loads(line.removeprefix("answer "))

        right, reads = ask(), faults.num_reads
        assert isinstance(right, list)
        assert reads > 0
        faults.fail()
        error = ask()
        assert str(path) in str(error)
        assert "Input/output error" in str(error)
        assert faults.num_faults > 0
        faults.heal()
        assert ask() == right
        for error_number in (errno.EIO, errno.EINTR):
            logged.clear()
            faults.fail(after=20, times=2, error=error_number)  # of one read, or of two
            assert ask() == right
            again = [line for line in logged if "a read failed and was tried again" in line]
            assert len(again) == 1  # both in the same step
            assert f"{path} cannot be read at" in again[0]
            assert os.strerror(error_number) in again[0]
        faults.fail(after=20, times=1, error=errno.ENOSPC)
        assert isinstance(ask(), str)
        assert ask() == right
        before = faults.num_faults
        faults.shorten(times=5)  # a part of a read is no error: the rest is read
        assert ask() == right
        assert faults.num_faults == before + 5
        sent.close()
