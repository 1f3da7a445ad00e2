"""Values of another type in the JSON files of a model: it loads all the same, or one line says what is wrong."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ktransformers.config import EngineConfig
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.errors import ConfigError, KTransformersError
from tests.support.models.demo import DEMO_CHECKPOINT

WRONG: list[Any] = [
    5,
    True,
    "x",
    [],
    ["x"],
    {},
    {"a": 5},
    [{"name": "default", "template": 5}],
    [{"name": 5}],
    {"default": 5},
]
FIELDS = [
    *(("tokenizer_config.json", field) for field in (None, "chat_template", "eos_token", "added_tokens_decoder",
      "tokenizer_class", "extra_special_tokens", "model_max_length", "auto_map")),
    *(("generation_config.json", field) for field in (None, "eos_token_id", "temperature", "top_k")),
    *(("config.json", field) for field in (None, "eos_token_id", "text_config", "decoder", "rope_scaling",
      "architectures", "quantization_config", "layer_types", "dtype")),
    *(("tokenizer.json", field) for field in (None, "added_tokens", "normalizer", "model", "decoder")),
    *(("chat_template.json", field) for field in (None, "chat_template")),
    *(("special_tokens_map.json", field) for field in (None, "eos_token")),
]  # fmt: skip


def opened(folder: Path) -> None:
    """All that reads these files before a weight is read."""
    tokenizer = describe_model(open_model(EngineConfig(model_path=folder))).tokenizer
    if tokenizer.has_chat_template:
        tokenizer.render_chat_template([{"role": "user", "content": "hi"}])


def refusal(folder: Path) -> str:
    """What is said of a model that cannot be opened; empty of one that can."""
    try:
        opened(folder)
    except KTransformersError as error:
        return str(error)
    return ""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / "model"))
    (path / "chat_template.jinja").unlink()  # which would be taken instead of the others
    return path


def put(path: Path, field: str | None, value: Any) -> None:
    whole = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(value if field is None else whole | {field: value}))


@pytest.mark.every(5)
@pytest.mark.parametrize(("file", "field"), FIELDS)
def test_a_value_of_another_type(file: str, field: str | None, folder: Path) -> None:
    before = (folder / file).read_bytes() if (folder / file).exists() else None
    for value in WRONG:
        put(folder / file, field, value)
        said = refusal(folder)
        assert "\n" not in said, value
        assert len(said) < 500, value
        if before is not None:
            (folder / file).write_bytes(before)


@pytest.mark.parametrize("value", [5, True, ["x"], [{"name": "default", "template": 5}], {"default": 5}])
def test_a_chat_template_that_is_no_text_is_named(value: Any, folder: Path) -> None:
    put(folder / "tokenizer_config.json", "chat_template", value)
    with pytest.raises(ConfigError, match=r"chat_template must be text|cannot be loaded"):
        opened(folder)
