"""Tables of n-grams beside experts that stay in files: their rows are read as experts are, and logits are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.disk.control_group import ControlGroup
from benchmarks.disk.counters import drop_cache
from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.errors import UnsupportedError, WeightError
from ktransformers.kernels.cpu import RowStore
from ktransformers.kernels.cpu.expert_store import ReadError
from ktransformers.kernels.types import QuantType
from ktransformers.operators.expert_files import ExpertFiles
from ktransformers.profiling.stored_counts import StoredCounts
from tests.models.test_qwen4_files import fp8, write_both
from tests.support.engines.one_sequence import StaticEngine, static_engine
from tests.support.gguf.qwen4 import write_qwen4_gguf
from tests.support.models.pooled_models import EOS, pooled_model
from tests.support.models.tiny_models import VOCAB_SIZE, write_safetensors

TABLE = "model.layers.2.ple"
GIB = 1 << 30


def gguf(folder: Path, **values: object) -> EngineConfig:
    sizes = {"ple_layer_ids": [3], "split_ngram_parts": 4, "ple_embed_dim": 128, "heads_per_ngram": 2, **values}
    path = write_qwen4_gguf(
        pooled_model("qwen4_exp_text", seed=2, **sizes), folder / "m.gguf", table_qtype=QuantType.IQ4_NL
    )
    return EngineConfig(gguf_path=path, cache_lens=128, cpu_infer=1, experts_from="ram")


def safetensors(folder: Path) -> EngineConfig:
    """Two tables, in twelve parts each."""
    write_safetensors(pooled_model("qwen4_exp_text", seed=2), folder)
    return EngineConfig(model_path=folder, cache_lens=128, cpu_infer=1, experts_from="ram")


def few_bits(folder: Path) -> EngineConfig:
    """Two tables in FP8; experts in FP8 as well, which have to be packed first: BF16 here."""
    write_both(fp8, folder / "few", folder / "wide")
    return EngineConfig(model_path=folder / "wide", cache_lens=128, cpu_infer=1, experts_from="ram")


def from_disk(config: EngineConfig) -> EngineConfig:
    return replace(config, experts_from="disk", experts_ram=1e-6)


def some_ids(count: int) -> list[int]:
    ids = torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(9)).tolist()
    return [EOS if at % 13 == 5 else token for at, token in enumerate(ids)]


def logits_of(engine: StaticEngine) -> torch.Tensor:
    """A prompt in two steps, and steps of one token."""
    ids, found = some_ids(60), list[torch.Tensor]()
    for first, count in ((0, 40), (40, 12), *((at, 1) for at in range(52, 60))):
        found.append(engine.runner.forward(ids[first : first + count], first, range(count)).clone())
    return torch.cat(found)


def rows_of(engine: StaticEngine) -> StoredCounts:
    files: ExpertFiles = engine.expert_files
    return files.take()[1]


@pytest.mark.parametrize("write", [gguf, safetensors, few_bits])
def test_logits_are_those_of_mapped_tables(
    write: Callable[[Path], EngineConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path)
    with closing(static_engine(config)) as engine:
        want = logits_of(engine)
    with closing(static_engine(from_disk(config))) as engine:
        rows_of(engine)
        assert torch.equal(logits_of(engine), want)
        hits, misses, nbytes, seconds, errors = rows_of(engine)
        assert hits > 0
        assert misses * 4096 <= nbytes
        assert seconds > 0
        assert errors == 0
        assert torch.equal(logits_of(engine), want)
        assert rows_of(engine)[1:3] == (0, 0)  # all of them are in memory now
    monkeypatch.setattr("ktransformers.kernels.cpu.row_store.ROW_CACHE_NBYTES", 0)
    with closing(static_engine(from_disk(config))) as engine:
        assert torch.equal(logits_of(engine), want)


def test_a_plan_has_the_rows_that_stay(tmp_path: Path) -> None:
    config = gguf(tmp_path)
    mapped, stored = (
        {entry.key: entry for entry in plan_model(one).entries}[TABLE] for one in (config, from_disk(config))
    )
    assert mapped.in_files == stored.in_files > 0
    assert stored.looked_up["cpu"] > mapped.looked_up["cpu"] == 0
    assert stored.nbytes["cpu"] - mapped.nbytes["cpu"] == stored.looked_up["cpu"]
    assert (mapped.note, stored.note) == ("", "rows are read from the disk")


def test_a_read_that_fails(tmp_path: Path) -> None:
    config = from_disk(gguf(tmp_path))
    with closing(static_engine(config)) as engine:
        want = logits_of(engine)
    with closing(static_engine(config)) as engine:
        (table,) = engine.expert_files._tables
        table.handle._fail_next(1)
        with pytest.raises(ReadError, match=r"m\.gguf cannot be read"):
            logits_of(engine)
        assert rows_of(engine)[4] == 1
        assert torch.equal(logits_of(engine), want)


def test_a_table_that_cannot_be_read_while_loading_is_a_weight_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: RowStore, ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        raise ReadError("m.gguf cannot be read")

    config = from_disk(gguf(tmp_path))
    monkeypatch.setattr(RowStore, "gather", failing)
    with pytest.raises(WeightError, match=r"m\.gguf"):
        static_engine(config)


LOGITS = """
import json, sys
from pathlib import Path
from dataclasses import replace
from ktransformers.config import EngineConfig
from tests.engine.load.test_stored_rows import from_disk, logits_of, rows_of
from tests.support.engines.one_sequence import static_engine

if __name__ == "__main__":
    config = EngineConfig(model_path=Path(sys.argv[1]), cache_lens=128, cpu_infer=1, self_check=False)
    is_mapped = sys.argv[2] == "mapped"
    engine = static_engine(replace(config, experts_from="ram") if is_mapped else from_disk(config))
    logits = logits_of(engine).double().flatten().tolist()
    rows = () if is_mapped else rows_of(engine)
    io = dict(line.split(": ") for line in open("/proc/self/io").read().splitlines())
    status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
    held = 1024 * int(status["RssAnon"].split()[0])
    print("said " + json.dumps([logits, rows, int(io["read_bytes"]), held]))
"""


@pytest.mark.slow
def test_a_table_larger_than_a_control_group(tmp_path: Path) -> None:
    """What is mapped finds its pages again in the larger group; the smaller one holds what the program needs, less than
    the table, and nothing but rows is read of it."""
    sizes = {"ple_layer_ids": [1], "ple_embed_dim": 256, "ngram_vocab_size_base": 700_000}
    table = 8 * 700_000 * 32 * 4
    write_safetensors(pooled_model("qwen4_exp_text", seed=2, **sizes), tmp_path)

    def run(limit: int, how: str) -> tuple[list[float], list[float], int, int]:
        for path in tmp_path.iterdir():
            drop_cache(path)
        with ControlGroup(limit) as group:
            command = group.command(sys.executable, "-c", LOGITS, str(tmp_path), how)
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert (done.returncode, group.oom_kills()) == (0, 0), done.stderr
        line = next(line for line in done.stdout.splitlines() if line.startswith("said "))
        logits, rows, read, held = json.loads(line.removeprefix("said "))
        return logits, rows, read, held

    try:
        want, _, _, held = run(8 * GIB, "mapped")
    except UnsupportedError as error:
        pytest.skip(str(error))
    limit = held + (192 << 20)
    assert limit < table
    found, (hits, misses, nbytes, _, errors), read, _ = run(limit, "disk")
    assert found == want
    assert hits + misses == 60 * 8
    assert errors == 0
    assert nbytes <= min(read, 8 << 20)
    assert read < table // 2  # the other weights, with what the system reads ahead of them
