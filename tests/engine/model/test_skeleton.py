"""Configs that cannot be used say so in words of this program, not in those of a library's Python API."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ktransformers.engine.model.skeleton import load_hf_config
from ktransformers.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": "brand_new"}, r"transformers [\d.]+ does not know model_type 'brand_new'; a newer"),
        (
            {"model_type": "brand_new", "auto_map": {"AutoConfig": "configuration_new.NewConfig"}},
            r"needs Python code that comes with it; --trust_remote_code",
        ),
        ({"architectures": ["NewForCausalLM"]}, "names no model_type"),
        ([], "holds no JSON object"),
    ],
)
def test_unknown_model_types(values: object, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=message) as error:
        load_hf_config(tmp_path)
    assert "huggingface.co" not in str(error.value)
    assert "trust_remote_code=True" not in str(error.value)
    assert "\n" not in str(error.value)
