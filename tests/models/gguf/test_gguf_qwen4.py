"""Qwen3.8-Flash-Next (qwen4exp) from GGUF, written as llama.cpp's converter does: config, parameters, logits."""

from __future__ import annotations

from contextlib import closing
from itertools import islice
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import KTransformersError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.models.ngram_hash import hash_multipliers, primes_from
from ktransformers.weights.gguf.file import open_gguf
from tests.models.gguf.test_gguf_architectures import check_hostile
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.qwen4 import write_qwen4_gguf
from tests.support.models.made import logits_in, logits_of
from tests.support.models.pooled_models import EOS, pooled_model
from tests.support.models.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4  # the file has 1 + weight and -exp(A_log), which round
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
VALUES: dict[str, object] = {
    "ple_layer_ids": [3],
    "split_ngram_parts": 4,
    "rope_parameters": {**ROPE, "mrope_interleaved": True},
}


def qwen4(**values: object) -> PreTrainedModel:
    return pooled_model("qwen4_exp_text", seed=2, **{**VALUES, **values})


def some_ids(count: int = 40) -> list[int]:
    ids = torch.randint(3, VOCAB_SIZE, (count,), generator=torch.Generator().manual_seed(9)).tolist()
    return [EOS if at % 13 == 5 else token for at, token in enumerate(ids)]


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"ple_layer_ids": None, "linear_num_key_heads": 4},
        {"tie_word_embeddings": True, "ngram_size": 4, "ple_embed_dim": 48},
    ],
)
def test_config_and_logits_come_back(values: dict[str, object], tmp_path: Path) -> None:
    model = qwen4(**values)
    path = write_qwen4_gguf(model, tmp_path / "m.gguf")
    config = config_of_model(open_gguf(path))
    gone = {"architectures", "dtype", "transformers_version", "pad_token_id"}
    follow = {"ngram_vocab_size_base", "make_ngram_vocab_size_divisible_by", "split_ngram_parts", "intermediate_size"}
    if not model.config.ple_layer_ids:
        follow |= {"ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram"}
    want, got = model.config.to_dict(), config.to_dict()
    assert {key: value for key, value in want.items() if key not in gone | follow and got.get(key) != value} == {}
    ids = some_ids()
    expected = logits_of(model, ids)
    with closing(static_engine(EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1))) as engine:
        found = logits_in(engine, ids, [30, *[1] * 10])
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_the_table_is_read_as_it_is_and_by_a_gpu(tmp_path: Path) -> None:
    """Rows of 32 columns in blocks; the model's other weights stay what they were."""
    model = qwen4(ple_embed_dim=128, heads_per_ngram=2, ngram_vocab_size_base=50)
    path = write_qwen4_gguf(model, tmp_path / "m.gguf", table_qtype=QuantType.IQ4_NL)
    grams = model.get_submodule("model.layers.2.ple.ple_embedding")
    tensor = open_gguf(path).tensors["per_layer_token_embd.weight"]
    assert tensor.qtype is QuantType.IQ4_NL
    stored = next(one for one in gguf.GGUFReader(path).tensors if one.name == "per_layer_token_embd.weight")
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    grams.ngram_embedding.weight.data.copy_(torch.from_numpy(np.array(values)))  # type: ignore[union-attr]
    ids = some_ids()
    expected = logits_of(model, ids)
    settings = EngineConfig(gguf_path=path, cache_lens=64, cpu_infer=1)
    for hardware in (None, fake_hardware(1)):
        with closing(static_engine(settings, hardware=hardware)) as engine:
            found = logits_in(engine, ids, [30, *[1] * 10])
        assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("key", ["layer_multipliers", "head_offsets", "head_vocab_sizes", "layers"])
def test_numbers_of_another_seed_are_refused(key: str, tmp_path: Path) -> None:
    file = open_gguf(write_qwen4_gguf(qwen4(), tmp_path / "m.gguf"))
    metadata, shapes = dict(file.metadata), {name: tensor.shape for name, tensor in file.tensors.items()}
    name = f"qwen4exp.ple.{key}"
    metadata[name] = np.append(metadata[name], 1) if key == "layers" else np.asarray(metadata[name]) + 2
    with pytest.raises(UnsupportedError, match=r"in 2 layers|do not follow from the seed"):
        config_from_gguf(metadata, shapes)


@pytest.mark.parametrize(
    ("changes", "table"),
    [
        ({"ngram_size": 1, "head_vocab_sizes": np.array([], dtype=np.int64)}, (1 << 12, 16)),
        ({"head_vocab_sizes": np.array([1 << 62, *[-(1 << 59)] * 7])}, (1 << 12, 16)),  # whose primes take years
        ({"head_vocab_sizes": np.array([2] * 8)}, (1 << 12, 16)),
        ({}, (1 << 20,)),
    ],
)
def test_hostile_numbers_of_ngrams(changes: dict[str, object], table: tuple[int, ...], tmp_path: Path) -> None:
    file = open_gguf(write_qwen4_gguf(qwen4(), tmp_path / "m.gguf"))
    metadata = dict(file.metadata) | {f"qwen4exp.ple.{key}": value for key, value in changes.items()}
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()} | {"per_layer_token_embd.weight": table}
    assert len(np.asarray(file.metadata["qwen4exp.ple.head_vocab_sizes"])) == 8
    with pytest.raises(KTransformersError, match=r"ngram_size is 1|do not follow from the seed|a matrix"):
        config_from_gguf(metadata, shapes)


def test_no_value_of_a_key_is_taken_amiss(tmp_path: Path) -> None:
    check_hostile(open_gguf(write_qwen4_gguf(qwen4(), tmp_path / "m.gguf")))


def test_numbers_of_published_files() -> None:
    """Those of Qwen3.8-Flash-Next's n-grams, as its files have them."""
    assert hash_multipliers(248320, 3, 0, 1234) == [23703573157769, 20109073645365, 8052911324071]
    sizes = list(islice(primes_from(20_000_000), 16))
    assert sizes[:3] == [20000003, 20000023, 20000033]
    assert sizes[-1] == 20000171
    assert sum(sizes[:-1]) == 300001275
    assert list(islice(primes_from(1), 4)) == [2, 3, 5, 7]
