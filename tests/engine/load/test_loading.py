"""What a model holds once loaded, and on the way there, beside what its plan says: RSS of a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from ktransformers.bench.loading.files import FileFormat, FileShape, write_files
from ktransformers.config import EngineConfig
from ktransformers.engine.load import builder, stages
from ktransformers.kernels.types import QuantType
from ktransformers.optimize import apply
from ktransformers.weights.read_ahead import ReadAhead
from tests.support.checks.mapped_memory import cached_bytes, settled

LAYERS, HIDDEN, EXPERTS, WIDTH, VOCAB = 16, 512, 16, 256, 8192

MEASURE = """
import json, sys
from pathlib import Path
from ktransformers.config import EngineConfig
from ktransformers.engine.load import builder, stages

def memory(what):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.split(what + ":")[1].split()[0])

inner, found = stages.load_plan, {}

def measured(model, plan, source, *rest):
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
    inner(model, plan, source, *rest)
    found.update(held=memory("VmRSS") - before, peak=memory("VmHWM") - before, planned=plan.weight_bytes["cpu"],
                 tensors=len(list(source.stored_names())))

stages.load_plan = measured
engine = builder.build_engine(EngineConfig(**{sys.argv[2]: Path(sys.argv[1])}, cpu_infer=2, cache_lens=64))
print(json.dumps(found))
engine.close()
"""


def write_model(path: Path, qtype: QuantType) -> None:
    """A model of qwen3_moe's shape whose matrices are random blocks of one type."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(8)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_feed_forward_length(WIDTH)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(4)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_vocab_size(VOCAB)
    writer.add_string("tokenizer.ggml.model", "no_vocab")
    block, nbytes = gguf.GGML_QUANT_SIZES[qtype]

    def matrix(name: str, *shape: int) -> None:
        blocks = rng.integers(0, 256, size=(*shape[:-1], shape[-1] // block, nbytes), dtype=np.uint8)
        at = nbytes - 2 if qtype is QuantType.Q3_K else 0
        blocks[..., at : at + 2] = np.frombuffer(np.float16(1e-3).tobytes(), dtype=np.uint8)
        writer.add_tensor(name, blocks.reshape(*shape[:-1], -1), raw_dtype=qtype)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(name, np.ones(size, dtype=np.float32))

    matrix("token_embd.weight", VOCAB, HIDDEN)
    matrix("output.weight", VOCAB, HIDDEN)
    ones("output_norm.weight", HIDDEN)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        for name, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", 64), ("attn_k_norm", 64)):
            ones(f"{prefix}{name}.weight", size)
        for name, rows in (("attn_q", 512), ("attn_k", 128), ("attn_v", 128), ("attn_output", HIDDEN)):
            matrix(f"{prefix}{name}.weight", rows, 512)
        router = rng.standard_normal((EXPERTS, HIDDEN)).astype(np.float32) * 0.02
        writer.add_tensor(f"{prefix}ffn_gate_inp.weight", router)
        matrix(f"{prefix}ffn_gate_exps.weight", EXPERTS, WIDTH, HIDDEN)
        matrix(f"{prefix}ffn_up_exps.weight", EXPERTS, WIDTH, HIDDEN)
        matrix(f"{prefix}ffn_down_exps.weight", EXPERTS, HIDDEN, WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def measured(path: Path, flag: str) -> dict[str, int]:
    """What MEASURE finds."""
    command = [sys.executable, "-c", MEASURE, str(path), flag]
    found: dict[str, int] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return found


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux about memory")


@pytest.mark.every(4)
@linux_only
@pytest.mark.parametrize("qtype", [QuantType.Q5_0, QuantType.Q3_K], ids=lambda qtype: qtype.name)
def test_weights_hold_what_was_planned(qtype: QuantType, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, qtype)
    found = measured(path, "gguf_path")
    # Two pages at the edges of a tensor in the file, two at those of its repacked form; objects of Python and stacks.
    margin = found["tensors"] * 4 * 4096 + (8 << 20)
    assert found["planned"] > 4 * margin
    assert 0.9 * found["planned"] < found["held"] < found["planned"] + margin
    assert found["peak"] < 1.1 * found["planned"] + margin


@pytest.mark.exhaustive
@linux_only
@pytest.mark.parametrize(("kind", "flag"), [("gguf", "gguf_path"), ("fp8", "model_path")])
def test_large_matrices_are_in_memory_once(kind: FileFormat, flag: str, tmp_path: Path) -> None:
    """Tensors of 20 to 30 MB, any of which would be seen if it were there twice, in a model of 70 or 100."""
    shape = FileShape(layers=1, hidden=1024, experts=32, width=1024, heads=8, vocab=1024)
    found = measured(write_files(tmp_path, shape, kind), flag)
    assert 0.95 * found["planned"] < found["held"]
    assert found["peak"] < 1.1 * found["held"]


@linux_only
@pytest.mark.parametrize("share", [0.0, 1e6])
def test_files_stay_in_the_systems_cache_where_ram_holds_them_too(
    share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(apply, "_CACHE_SHARE", share)
    monkeypatch.setattr(apply, "ReadAhead", partial(ReadAhead, distance=-(1 << 40)))  # it may be late
    shape = FileShape(layers=1, hidden=512, experts=32, width=512, heads=4, vocab=512)
    path = settled(write_files(tmp_path, shape, "gguf"))
    inner, cached = stages.load_plan, list[int]()

    def load_plan(*args: Any) -> None:
        inner(*args)
        cached.append(cached_bytes(path))  # what identifies the model is read later

    monkeypatch.setattr(stages, "load_plan", load_plan)
    with caplog.at_level("INFO"):
        builder.build_engine(EngineConfig(gguf_path=path, cpu_infer=1, cache_lens=64)).close()
    said = "what is loaded leaves the system's cache" in caplog.text
    if share:
        assert not said
        assert cached[0] >= path.stat().st_size
    else:
        assert said
        assert cached[0] < path.stat().st_size / 2  # a system drops whole runs of pages only
