"""Files that llama.cpp could not open are refused with the tensor or the sizes; what stands here is from its loader.

Where it is installed, test_llama_cpp.py has it open what is accepted, and compares its logits.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.convert.openable import check_opens
from ktransformers.errors import UnsupportedError
from ktransformers.models.gguf.of_config import WRITABLE_FAMILIES
from tests.support.gguf.converting import contents, quantized, tensors
from tests.support.models.tiny_models import tiny_model, write_safetensors
from tests.support.models.writable_models import FACTORS, LONGROPE, REFUSED, WRITTEN


@pytest.mark.every(5)
@pytest.mark.parametrize(("model_type", "values", "message"), REFUSED)
def test_refused(model_type: str, values: dict[str, object], message: str, tmp_path: Path) -> None:
    model = write_safetensors(tiny_model(model_type, **values), tmp_path / "model")
    with pytest.raises(UnsupportedError, match=message):
        quantized(model, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def test_every_family_is_tried() -> None:
    assert {one[0] for one in WRITTEN} == set(WRITABLE_FAMILIES)


def test_longrope_is_written_as_the_converter_writes_phi3s(tmp_path: Path) -> None:
    """Its kind, without which llama.cpp takes both tensors for too many; its factors; the scale of what is rotated."""
    model = tiny_model("llama", **LONGROPE)
    quantized(write_safetensors(model, tmp_path / "model"), tmp_path / "out.gguf")
    said = {key: value[1] for key, value in contents(tmp_path / "out.gguf").items() if "rope.scaling" in key}
    assert {key: value for key, value in said.items() if "attn_factor" not in key} == {
        "llama.rope.scaling.type": "longrope",
        "llama.rope.scaling.original_context_length": 512,
    }
    assert said["llama.rope.scaling.attn_factor"] == pytest.approx(model.model.rotary_emb.attention_scaling)
    written = tensors(tmp_path / "out.gguf")
    for kind in ("long", "short"):
        values = written[f"rope_factors_{kind}.weight"][2].view("float32")
        assert values.tolist() == pytest.approx(LONGROPE["rope_parameters"][f"{kind}_factor"])  # type: ignore[index]


@pytest.mark.parametrize(("name", "arch"), [("rope_freqs.weight", "qwen3"), ("blk.1.attn_q.bias", "deepseek2")])
def test_the_first_tensor_too_many_is_named(name: str, arch: str) -> None:
    with pytest.raises(UnsupportedError, match=f"opens no {arch} file .* does not read {name}"):
        check_opens(arch, {}, {"output.weight": (8, 8), name: (8,)})


def test_architectures_that_are_not_written_pass() -> None:
    check_opens("gemma3", {}, {"rope_freqs.weight": (8,)})


def test_factors_are_of_as_much_of_a_head_as_rotates(tmp_path: Path) -> None:
    quantized(write_safetensors(tiny_model("llama", **FACTORS), tmp_path / "model"), tmp_path / "out.gguf")
    assert tensors(tmp_path / "out.gguf")["rope_freqs.weight"][1] == (8,)
