"""Parameters that conversions make of stored tensors, against the operations of transformers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import core_model_loading
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.models.facts import ModelFacts
from ktransformers.models.families import FAMILY_SUPPORT, Support
from ktransformers.weights.conversion.checkpoint_names import CheckpointNames, Origin
from ktransformers.weights.conversion.operations import CONVERSIONS, converted, converted_shape
from ktransformers.weights.safetensors.file import open_safetensors
from ktransformers.weights.safetensors.source import SafetensorsSource
from tests.support.models.tiny_models import tiny_model

QKV = "model.layers.0.self_attn.qkv_proj.weight"
PARTS = ("q_proj", "k_proj", "v_proj")
NAMES = [f"model.layers.0.self_attn.{part}.weight" for part in PARTS]
OF_EXPERTS = {"Transpose", "TransposeIfNeeded", "MergeModulelist", "ErnieFuseAndSplitTextVisionExperts"}
"""Operations on experts alone, which weights/safetensors/fused_experts.py and the names of experts know."""
OF_IMAGES = {"PermuteForRope", "Conv3dToLinear"}


def ours(operations: tuple[str, ...], parts: list[torch.Tensor], dims: tuple[int, ...], **more: Any) -> torch.Tensor:
    sizes = more.pop("sizes", ())
    origin = Origin(operations, tuple(map(str, range(len(parts)))), dims=dims, **more)
    made = converted(parts, origin, sizes)
    assert converted_shape([part.shape for part in parts], origin, sizes) == made.shape
    return made


@pytest.mark.parametrize("dim", [0, 1])
def test_operations_do_what_those_of_transformers_do(dim: int) -> None:
    x, y = torch.randn(6, 12), torch.randn(6, 12)

    def theirs(operation: Any, *parts: torch.Tensor, targets: tuple[str, ...] = ("t",)) -> dict[str, torch.Tensor]:
        sources = [str(i) for i in range(len(parts))]
        return operation.convert(dict(zip(sources, ([p] for p in parts), strict=True)), sources, list(targets))

    assert torch.equal(ours(("Concatenate",), [x, y], (dim,)), theirs(core_model_loading.Concatenate(dim), x, y)["t"])
    assert torch.equal(ours(("Transpose",), [x], (0,)), theirs(core_model_loading.Transpose(0, 1), x)["t"])
    chunks = theirs(core_model_loading.Chunk(dim), x, targets=PARTS)
    for index, part in enumerate(PARTS):
        assert torch.equal(ours(("Chunk",), [x], (dim,), index=index, count=3), chunks[part])
    if hasattr(core_model_loading, "Interleave"):
        apart = theirs(core_model_loading.Interleave(dim), x)["t"]
        assert torch.equal(ours(("Interleave",), [x], (dim,)), apart)
        both = ours(("Interleave", "Chunk"), [x], (dim, dim), index=1, count=2)
        assert torch.equal(both, apart.chunk(2, dim)[1])


@pytest.mark.parametrize("sizes", [(8, 2, 2), (4, 4, 4), (1, 7, 4)])
def test_a_split_has_parts_of_any_size(sizes: tuple[int, ...]) -> None:
    x = torch.randn(12, 5)
    starts = (0, sizes[0], sizes[0] + sizes[1])
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        made = ours(("Split",), [x], (0,), index=index, count=3, sizes=sizes)
        assert torch.equal(made, x[start : start + size])


def qkv_source(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, prefix: str = ""
) -> SafetensorsSource:
    """A llama whose queries, keys and values are stored in one tensor."""
    model = tiny_model("llama").to(dtype)
    state = {name.removeprefix(prefix): tensor for name, tensor in model.state_dict().items()}
    stored = {name: tensor for name, tensor in state.items() if "layers.0" not in name or "_proj" not in name}
    stored |= {name: tensor for name, tensor in state.items() if name.endswith(("o_proj.weight", "mlp.up_proj.weight"))}
    parts = [state[name.removeprefix(prefix)] for name in NAMES]
    safetensors.torch.save_file(stored | {QKV.removeprefix(prefix): torch.cat(parts)}, folder / "model.safetensors")
    split = core_model_loading.WeightConverter("qkv_proj", list(PARTS), operations=[core_model_loading.Chunk(dim=0)])

    def mapping(kind: str) -> list[Any] | None:
        return [split] if kind == "llama" else None

    monkeypatch.setattr("ktransformers.weights.conversion.checkpoint_names.get_checkpoint_conversion_mapping", mapping)
    monkeypatch.setattr("ktransformers.weights.conversion.checkpoint_names._operation", lambda one: "Split")
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return SafetensorsSource(open_safetensors(folder), ModelFacts.of(model.config), shapes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_split_tensors_of_a_file(
    dtype: torch.dtype, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sizes of the module tree, also where files leave out the base model's prefix."""
    source, model = qkv_source(tmp_path, monkeypatch, dtype, prefix), tiny_model("llama").to(dtype)
    wanted = model.state_dict()
    assert wanted[NAMES[0]].shape != wanted[NAMES[1]].shape
    for name in NAMES:
        info = source.find(name)
        assert info is not None
        assert info.shape == tuple(wanted[name].shape)
        assert info.stored_names == (QKV.removeprefix(prefix),)
        assert torch.equal(source.dense(name), wanted[name].float())


def test_a_split_that_does_not_add_up_names_the_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = qkv_source(tmp_path, monkeypatch, torch.float32)
    source._shapes = {**source._shapes, NAMES[2]: (7, 64)}
    with pytest.raises(TensorMismatchError, match=r"q_proj\.weight' is made from .*qkv_proj.*Split along dimension 0"):
        source.find(NAMES[0])
    source._shapes = {name: shape for name, shape in source._shapes.items() if "v_proj" not in name}
    with pytest.raises(UnsupportedError, match=r"the model has no .*v_proj\.weight, whose size says where"):
        source.find(NAMES[0])


def test_an_operation_that_is_not_known_is_named() -> None:
    with pytest.raises(UnsupportedError, match="transformers makes it by Rotate, which is not supported"):
        ours(("Rotate",), [torch.zeros(2, 2)], (0,))
    with pytest.raises(TensorMismatchError, match="Concatenate along dimension 0"):
        ours(("Concatenate",), [torch.zeros(2, 2), torch.zeros(2, 3)], (0,))
    with pytest.raises(TensorMismatchError, match="10 are not divisible by 3"):
        ours(("Chunk",), [torch.zeros(10, 2)], (0,), count=3)


def test_shards_are_merged_in_the_order_of_their_numbers() -> None:
    """transformers sorts names by number; safetensors lists shard 10 before shard 2."""
    shards = [f"model.layers.1.ngram_embedding.shard_{n}.weight" for n in range(12)]
    merge = core_model_loading.WeightConverter(
        "ngram_embedding.shard_*.weight", "ngram_embedding.weight", operations=[core_model_loading.Concatenate(dim=0)]
    )
    names = CheckpointNames("llama", ())
    names._add_converted("model.layers.1.ngram_embedding.weight", merge, {merge.source_patterns[0]: sorted(shards)})
    origin = names.find("model.layers.1.ngram_embedding.weight")
    assert origin is not None
    assert list(origin.sources) == shards


@pytest.mark.parametrize("model_type", [name for name, line in FAMILY_SUPPORT.items() if isinstance(line, Support)])
def test_every_conversion_of_a_family_that_runs_is_known(model_type: str) -> None:
    known = {*CONVERSIONS, *OF_EXPERTS, *OF_IMAGES}
    for transform in get_checkpoint_conversion_mapping(model_type) or ():
        for operation in getattr(transform, "operations", None) or ():
            assert type(operation).__name__ in known, f"{model_type} has {transform.source_patterns}"
