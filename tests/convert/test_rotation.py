"""Scaled rotations: from config.json, however it spells them, to the keys of llama.cpp's converter, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ktransformers.engine.model.opened import config_of_model
from ktransformers.errors import UnsupportedError
from ktransformers.weights.gguf.file import open_gguf
from tests.support.gguf.converting import contents, quantized, tensors
from tests.support.models.tiny_models import tiny_model, write_safetensors

THETA, LONGEST, ORIGINAL = 10000.0, 512, 128
LONG, SHORT = [1.0 + at / 4 for at in range(8)], [1.0 + at / 16 for at in range(8)]  # of heads of 16
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
LONGROPE = {
    "rope_type": "longrope",
    "long_factor": LONG,
    "short_factor": SHORT,
    "original_max_position_embeddings": ORIGINAL,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
YARN_KEYS = {"type": "yarn", "factor": 4.0, "original_context_length": ORIGINAL}
LONGROPE_KEYS = {"type": "longrope", "original_context_length": ORIGINAL}
FACTORS = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}

Row = tuple[str, dict[str, Any], dict[str, Any], dict[str, list[float] | None]]

ROWS: dict[str, Row] = {  # family, what config.json says, rope.scaling.* of the file, tensors
    "linear": ("llama", {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}, {}),
    "linear of experts": ("qwen3_moe", {"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 2.5}, {}),
    "yarn": ("llama", YARN, YARN_KEYS, {}),
    "yarn of experts": ("qwen3_moe", YARN, YARN_KEYS, {}),
    "yarn, its betas": (
        "qwen3",
        {**YARN, "beta_fast": 16.0, "beta_slow": 2.0},
        {**YARN_KEYS, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        {},
    ),
    "yarn, usual betas": (
        "qwen3",
        {**YARN, "beta_fast": 32, "beta_slow": 1},
        {**YARN_KEYS, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0},
        {},
    ),
    "yarn, a factor of attention": (
        "llama",
        {**YARN, "attention_factor": 0.75},
        {**YARN_KEYS, "yarn_attn_factor": 0.75},
        {},
    ),
    "yarn of latents": (
        "deepseek_v3",
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        {**YARN_KEYS, "yarn_log_multiplier": float(np.float32(0.1))},
        {},
    ),
    "yarn of latents, a factor of attention": (
        "deepseek_v3",
        {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 0.75},
        {**YARN_KEYS, "yarn_log_multiplier": float(np.float32(0.1)), "yarn_attn_factor": 0.75},
        {},
    ),
    "yarn of gpt-oss": ("gpt_oss", {**YARN, "truncate": False}, YARN_KEYS, {}),
    "longrope": (
        "llama",
        LONGROPE,
        {**LONGROPE_KEYS, "attn_factor": (1 + np.log(4.0) / np.log(128.0)) ** 0.5},
        FACTORS,
    ),
    "longrope, a factor": (
        "llama",
        {**LONGROPE, "factor": 16.0},
        {**LONGROPE_KEYS, "attn_factor": (1 + np.log(16.0) / np.log(128.0)) ** 0.5},
        FACTORS,
    ),
    "longrope, a factor of attention": (
        "llama",
        {**LONGROPE, "attention_factor": 1.125},
        {**LONGROPE_KEYS, "attn_factor": 1.125},
        FACTORS,
    ),
    "llama3": ("llama", LLAMA3, {}, {"rope_freqs.weight": None}),
}


def said(config: dict[str, Any], scaling: dict[str, Any], spelling: str) -> dict[str, Any]:
    """A config.json with the scaling as transformers 5 writes it, or as files of before do."""
    rest = {key: value for key, value in config.items() if key not in ("rope_parameters", "rope_scaling")}
    rest["max_position_embeddings"] = LONGEST
    if spelling == "rope_parameters":
        return {**rest, "rope_parameters": {**scaling, "rope_theta": THETA}}
    old = {key: value for key, value in scaling.items() if key != "rope_type"}
    return {**rest, "rope_theta": THETA, "rope_scaling": {**old, spelling: scaling["rope_type"]}}


def folder_of(family: str, scaling: dict[str, Any], spelling: str, folder: Path) -> Path:
    write_safetensors(tiny_model(family, seed=3), folder)
    file = folder / "config.json"
    file.write_text(json.dumps(said(json.loads(file.read_text()), scaling, spelling)))
    return folder


@pytest.mark.every(5)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_type", "type"])
@pytest.mark.parametrize("row", ROWS)
def test_a_scaled_rotation_comes_back(row: str, spelling: str, tmp_path: Path) -> None:
    family, scaling, keys, factors = ROWS[row]
    folder, out = folder_of(family, scaling, spelling, tmp_path / "model"), tmp_path / "out.gguf"
    quantized(folder, out)
    found = {
        key.partition(".rope.scaling.")[2]: value for key, (_, value) in contents(out).items() if ".scaling." in key
    }
    assert found == {key: value if isinstance(value, str) else pytest.approx(value) for key, value in keys.items()}
    written = tensors(out)
    assert {name for name in written if name.startswith("rope_")} == set(factors)
    for name, values in factors.items():
        if values is not None:
            assert written[name][2].view(np.float32).tolist() == values
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    back = config_of_model(open_gguf(out))
    got = AutoModelForCausalLM.from_config(back, dtype=torch.float32, attn_implementation="eager").eval()
    got.load_state_dict(wanted.state_dict())
    for length in (ORIGINAL // 4, ORIGINAL + 20):  # short texts, and long ones
        ids = torch.arange(length)[None] % 150
        with torch.no_grad():
            assert torch.allclose(got(ids).logits, wanted(ids).logits, rtol=1e-5, atol=1e-5)
    ours, given = back.rope_parameters, AutoConfig.from_pretrained(folder).rope_parameters
    if "factor" not in given or given["rope_type"] != "longrope":  # which is said by the factor of attention
        assert {key: pytest.approx(ours[key]) if key != "rope_type" else ours[key] for key in given if key in ours} == {
            key: given[key] for key in given if key in ours
        }
        assert given.keys() - ours.keys() <= {"type", "truncate"}


@pytest.mark.parametrize(
    ("family", "scaling"),
    [("qwen3", {**YARN, "truncate": False}), ("llama", {"rope_type": "dynamic", "factor": 4.0})],
)
def test_what_the_format_has_no_key_for_is_refused(family: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_of(family, scaling, "rope_parameters", tmp_path / "model")
    with pytest.raises(
        UnsupportedError, match=r"no keys for what this qwen3 config says: rope_par|'dynamic' has no keys"
    ):
        quantized(folder, tmp_path / "out.gguf")
