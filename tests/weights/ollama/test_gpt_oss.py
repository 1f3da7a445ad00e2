"""gpt-oss as Ollama's converter writes it: the same model as llama.cpp's file of it, bit for bit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.errors import FormatError
from ktransformers.kernels.types import QuantType
from ktransformers.weights.gguf.file import open_gguf
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.converting import contents, quantized, tensors
from tests.support.gguf.writer import write_gguf
from tests.support.models.agreement import prompt
from tests.support.models.tiny_models import tiny_model

ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
LEFT_OUT = ("expert_feed_forward_length", "rope.scaling.type", "rope.scaling.yarn_beta", "expert_gating", "rope.dim")


def as_ollama(path: Path, out: Path, also: dict[str, list[int]] | None = None) -> Path:
    """The file under Ollama's names, with the keys that its converter knows. also: more tensors, of ones."""
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(out, "gptoss")
    for field in reader.fields.values():
        key = field.name.replace("gpt-oss.", "gptoss.")
        if key.startswith("GGUF.") or key == "general.architecture" or any(part in key for part in LEFT_OUT):
            continue
        kind = field.types[0]
        if kind is gguf.GGUFValueType.ARRAY:
            writer.add_array(key, field.contents())
        else:
            writer.add_key_value(key, field.contents(), kind)
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(3)])
    writer.add_string("tokenizer.ggml.pre", "default")
    for tensor in reader.tensors:
        name = tensor.name.replace(".attn_output.", ".attn_out.").replace(".post_attention_norm.", ".ffn_norm.")
        name = re.sub(r"attn_sinks\.weight$", "attn_sinks", name)
        writer.add_tensor(name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, shape in (also or {}).items():
        writer.add_tensor(name, torch.ones(shape).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def written(folder: Path, **values: Any) -> Path:
    model = tiny_model("gpt_oss", seed=3, rope_parameters=ROPE, **values)
    return write_gguf(model, folder / "theirs.gguf", QuantType.MXFP4, QuantType.Q8_0)


def test_it_computes_what_the_file_of_llama_cpp_does(tmp_path: Path) -> None:
    path = written(tmp_path)
    ollama = as_ollama(path, tmp_path / "ollama.gguf")
    assert open_gguf(ollama).architecture == "gpt-oss"
    engines = [static_engine(EngineConfig(gguf_path=one, cache_lens=96, cpu_infer=1)) for one in (path, ollama)]
    configs = [engine.facts for engine in engines]
    assert configs[0] == configs[1]
    ids = prompt(engines[0].facts.vocab_size)
    first, second = (engine.runner.forward(ids, 0, range(len(ids))).clone() for engine in engines)
    assert torch.equal(first, second)


def test_its_names_are_those_of_llama_cpp(tmp_path: Path) -> None:
    path = written(tmp_path, layers=1)
    ours, theirs = open_gguf(as_ollama(path, tmp_path / "ollama.gguf")), open_gguf(path)
    assert set(ours.tensors) == set(theirs.tensors)
    for name in theirs.tensors:
        assert torch.equal(ours.raw(name).data, theirs.raw(name).data)
    assert not any(key.startswith("gptoss.") for key in ours.metadata)
    assert ours.metadata["tokenizer.ggml.pre"] == "gpt-4o"
    assert ours.metadata["gpt-oss.rope.scaling.type"] == "yarn"
    assert set(ours.files[0].value_types) == set(ours.metadata)


def test_it_is_quantized_into_a_file_of_llama_cpp(tmp_path: Path) -> None:
    ollama = as_ollama(written(tmp_path, layers=1), tmp_path / "ollama.gguf")
    quantized(ollama, tmp_path / "out.gguf", "q8_0")
    said = contents(tmp_path / "out.gguf")
    assert said["general.architecture"][1] == "gpt-oss"
    assert said["gpt-oss.rope.scaling.type"] == (["STRING"], "yarn")
    assert set(tensors(tmp_path / "out.gguf")) == set(open_gguf(ollama).tensors)


def test_what_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, layers=1)
    merged = as_ollama(path, tmp_path / "merged.gguf", {"blk.0.ffn_gate_up_exps.weight": [2, 4, 32]})
    with pytest.raises(FormatError, match=r"merged.gguf: tensor 'blk.0.ffn_gate_up_exps.weight'.*ollama pull"):
        open_gguf(merged)
    both = as_ollama(path, tmp_path / "both.gguf", {"blk.0.attn_sinks.weight": [4]})
    with pytest.raises(FormatError, match=r"names of both Ollama's and llama\.cpp's"):
        open_gguf(both)
