"""Activation statistics: the numbers of plain hooks, files that gguf's reader opens, old files, their use."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.cli import main
from ktransformers.config import EngineConfig
from ktransformers.convert.collect import Collector, chunks_of
from ktransformers.convert.imatrix import Imatrix, Statistics, read_imatrix, write_imatrix
from ktransformers.convert.mixtures import TypeRule
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import open_model
from ktransformers.engine.verify.reference_module import StoredWeights, build_reference_model
from ktransformers.errors import ConfigError, FormatError
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.kernels.types import QuantType
from ktransformers.optimize.tied import TiedSource
from tests.support.gguf.converting import contents, quantized, tensors
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.models.tiny_models import tiny_model, write_safetensors


def by_hooks(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Of the modules of the last layer: (sums, counts) by the name of the tensor, experts from what they are given."""
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.o_proj": "attn_output",
        "mlp.shared_experts.down_proj": "ffn_down_shexp",
    }

    def dense(name: str):
        def hook(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            rows = args[0].reshape(-1, args[0].shape[-1]).double()
            found[name] = (rows.square().sum(0, keepdim=True).numpy(), np.array([float(len(rows))]))

        return hook

    def experts(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        hidden, chosen = args[0].reshape(-1, args[0].shape[-1]).double(), args[1].reshape(-1, args[1].shape[-1])
        count = module.down_proj.shape[0]
        taken = torch.stack([(chosen == expert).any(dim=1) for expert in range(count)]).double()
        found["ffn_up_exps"] = ((taken @ hidden.square()).numpy(), taken.sum(1).numpy())
        inner = []
        for expert in range(count):
            gate, up = (hidden @ module.gate_up_proj[expert].double().T).chunk(2, dim=-1)
            inner.append(taken[expert] @ (torch.nn.functional.silu(gate) * up).square())
        found["ffn_down_exps"] = (torch.stack(inner).numpy(), taken.sum(1).numpy())

    layer = model.model.layers[-1]
    for path, name in names.items():
        if path in dict(layer.named_modules()):
            layer.get_submodule(path).register_forward_pre_hook(dense(name))
    layer.mlp.experts.register_forward_pre_hook(experts)
    with torch.no_grad():
        model(ids)
    return found


@pytest.mark.parametrize(("model_type", "is_gguf"), [("qwen3_moe", False), ("glm4_moe", False), ("qwen3_moe", True)])
def test_statistics_are_those_of_plain_hooks(model_type: str, is_gguf: bool, tmp_path: Path) -> None:
    model = tiny_model(model_type)
    ids = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(0))
    if is_gguf:
        config = EngineConfig(gguf_path=write_gguf(model, tmp_path / "m.gguf", experts="single"))
    else:
        config = EngineConfig(model_path=write_safetensors(model, tmp_path / "m"))
    opened = open_model(config)
    plan, twin, collector = plan_model(config, opened), build_reference_model(opened.hf_config), Collector(opened)
    weights = StoredWeights(twin, TiedSource(opened.source, plan.tied), plan, WorkerPool(1))
    weights.observe = collector.observe
    with torch.inference_mode(), weights:
        twin(input_ids=ids, use_cache=False, logits_to_keep=1)
    wanted = by_hooks(model, ids)
    assert len(wanted) >= 4
    for name, (sums, counts) in wanted.items():
        if is_gguf and name.endswith("_exps"):
            parts = [collector.tensors.get(f"blk.1.{name[:-5]}.{expert}.weight") for expert in range(8)]
            got = Statistics(np.concatenate([one.sums if one else 0 * sums[:1] for one in parts]),
                             np.concatenate([one.counts if one else np.zeros(1) for one in parts]))  # fmt: skip
        else:
            got = collector.tensors[f"blk.1.{name}.weight"]
        assert (got.counts == counts).all(), name
        assert np.allclose(got.sums, sums, rtol=1e-4), name
    assert "output.weight" not in collector.tensors


def test_chunks() -> None:
    assert chunks_of(range(10), 3, 0, None) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert chunks_of(range(10), 3, 2, 99) == [[99, 1, 2], [99, 4, 5]]
    with pytest.raises(ConfigError, match="has 10 tokens, not enough for a chunk of 11"):
        chunks_of(range(10), 11, 0, None)


def small(path: Path) -> Imatrix:
    sums = np.arange(1, 13, dtype=np.float64).reshape(3, 4)
    return Imatrix(path, {"blk.0.ffn_up_exps.weight": Statistics(sums, np.array([2.0, 0.0, 4.0])),
                          "blk.0.attn_q.weight": Statistics(sums[:1], np.array([8.0]))}, 5, 512, ["a.txt"])  # fmt: skip


def test_the_file_is_llama_cpps(tmp_path: Path) -> None:
    write_imatrix(small(tmp_path / "im.gguf"))
    assert contents(tmp_path / "im.gguf") == {
        "general.type": (["STRING"], "imatrix"),
        "imatrix.datasets": (["ARRAY", "STRING"], ["a.txt"]),
        "imatrix.chunk_count": (["UINT32"], 5),
        "imatrix.chunk_size": (["UINT32"], 512),
    }
    shapes = {tensor.name: tuple(tensor.shape.tolist()) for tensor in gguf.GGUFReader(tmp_path / "im.gguf").tensors}
    assert shapes["blk.0.ffn_up_exps.weight.in_sum2"] == (4, 3)  # fastest first
    assert shapes["blk.0.ffn_up_exps.weight.counts"] == (1, 3)
    back = read_imatrix(tmp_path / "im.gguf")
    assert (back.chunk_count, back.chunk_size, back.datasets) == (5, 512, ["a.txt"])
    for name, one in small(tmp_path).tensors.items():
        assert (back.tensors[name].sums == one.sums).all()
        assert (back.tensors[name].counts == one.counts).all()


def test_importance_is_a_mean_by_expert(tmp_path: Path) -> None:
    imatrix = small(tmp_path)
    found = imatrix.importance("blk.0.ffn_up_exps.weight", 3, 4)
    assert found is not None
    assert found[0].tolist() == [0.5, 1.0, 1.5, 2.0]
    assert found[1].tolist() == [15 / 6, 18 / 6, 21 / 6, 24 / 6]  # nobody chose it: what all others saw
    assert imatrix.importance("blk.0.attn_k.weight", 1, 4) is None
    with pytest.raises(FormatError, match=r"has statistics of \[1, 4\], the model \[1, 8\]"):
        imatrix.importance("blk.0.attn_q.weight", 1, 8)


def old_file(path: Path, calls: int = 2) -> Path:
    """What llama.cpp wrote before GGUF: two experts of three columns, and one matrix."""
    data = struct.pack("<i", 2)
    for name, values in (("blk.0.ffn_up_exps.weight", [2.0, 4, 6, 8, 10, 12]), ("blk.0.attn_q.weight", [1.0, 2, 3])):
        data += (
            struct.pack("<i", len(name))
            + name.encode()
            + struct.pack(f"<ii{len(values)}f", calls, len(values), *values)
        )
    path.write_bytes(data + struct.pack("<ii", 7, 5) + b"a.txt")
    return path


def test_old_files_are_read(tmp_path: Path) -> None:
    found = read_imatrix(old_file(tmp_path / "im.dat"))
    assert (found.chunk_count, found.datasets) == (7, ["a.txt"])
    experts = found.importance("blk.0.ffn_up_exps.weight", 2, 3)
    assert experts is not None
    assert experts.tolist() == [[1.0, 2, 3], [4, 5, 6]]
    data = (tmp_path / "im.dat").read_bytes()
    for end in (2, 9, 40, len(data) - 1):
        (tmp_path / "cut.dat").write_bytes(data[:end])
        with pytest.raises(FormatError, match=r"cut.dat: neither a GGUF file nor a whole file"):
            read_imatrix(tmp_path / "cut.dat")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="not of activation statistics"):
        read_imatrix(DEMO_GGUF)
    imatrix = small(tmp_path / "im.gguf")
    imatrix.tensors["blk.0.attn_q.weight"].sums[0, 0] = -1
    write_imatrix(imatrix)
    with pytest.raises(FormatError, match=r"attn_q.weight' are no sums of squares"):
        read_imatrix(tmp_path / "im.gguf")


def test_from_text_to_better_rounding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both commands on the demo model: what is multiplied with the weights errs less, and the file says of what."""
    text, out = tmp_path / "text.txt", tmp_path / "im.gguf"
    text.write_text("What is 17 + 25? 17 + 25 = 42. " * 40)
    arguments = ["imatrix", str(DEMO_CHECKPOINT), str(text), "-o", str(out), "--chunk", "64", "--chunks", "3"]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "3 chunks of 64 tokens" in said.err
    assert main(arguments) == 2
    assert "--force overwrites it" in capsys.readouterr().err
    imatrix = read_imatrix(out)
    assert imatrix.tensors["blk.0.attn_q.weight"].counts.tolist() == [3 * 64]
    name = "blk.1.ffn_up_exps.weight"
    rules = [TypeRule(re.compile(re.escape(name)), QuantType.Q3_K, 1)]
    for file, given, some in (("exact", None, []), ("plain", None, rules), ("weighted", imatrix, rules)):
        quantized(DEMO_CHECKPOINT, tmp_path / f"{file}.gguf", imatrix=given, rules=some)
    exact, plain, weighted = (tensors(tmp_path / f"{file}.gguf") for file in ("exact", "plain", "weighted"))
    importance = imatrix.importance(name, 16, 256)
    assert importance is not None
    errors = []
    for file in (plain, weighted):
        qtype, shape, data = file[name]
        values = gguf.quants.dequantize(data.reshape(shape[0] * shape[1], -1), qtype).reshape(shape)
        difference = values - exact[name][2].view(np.float32).reshape(shape)
        errors.append(float((difference.astype(np.float64) ** 2 * importance[:, None]).sum()))
    assert errors[1] < 0.95 * errors[0]
    found = contents(tmp_path / "weighted.gguf")
    assert found["quantize.imatrix.file"][1] == "im.gguf"
    assert found["quantize.imatrix.chunks_count"][1] == 3
