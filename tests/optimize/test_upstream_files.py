"""Rule files by the names that upstream ships them under: each means the shipped file of its family."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ktransformers.config import DEMO_MODEL_PATH, EngineConfig
from ktransformers.errors import ConfigError
from ktransformers.system.shipped_rules import shipped_path

UPSTREAM = {
    "DeepSeek-V2-Chat.yaml": "DeepSeek-V2-Chat-XPU DeepSeek-V2-Chat-multi-gpu DeepSeek-V2-Chat-multi-gpu-4 "
    "DeepSeek-V2-Chat",
    "DeepSeek-V2-Lite-Chat.yaml": "DeepSeek-V2-Lite-Chat-gpu-cpu DeepSeek-V2-Lite-Chat-multi-gpu DeepSeek-V2-Lite-Chat",
    "DeepSeek-V3-Chat.yaml": "DeepSeek-V3-Chat-amx DeepSeek-V3-Chat-amx-defer DeepSeek-V3-Chat-dcu "
    "DeepSeek-V3-Chat-fp8-linear-ggml-experts DeepSeek-V3-Chat-multi-gpu DeepSeek-V3-Chat-multi-gpu-4 "
    "DeepSeek-V3-Chat-multi-gpu-8 DeepSeek-V3-Chat-multi-gpu-fp8-linear-ggml-experts "
    "DeepSeek-V3-Chat-multi-gpu-marlin npu/DeepSeek-V3-Chat-300IA2-npu rocm/DeepSeek-V3-Chat "
    "Moonlight-16B-A3B DeepSeek-V3-Chat",
    "DeepSeek-V3-Chat-serve.yaml": "DeepSeek-V3-Chat-amx-serve DeepSeek-V3-Chat-amx-defer-serve "
    "DeepSeek-V3-Chat-fp8-linear-ggml-experts-serve npu/DeepSeek-V3-Chat-300IA2-npu-serve Moonlight-16B-A3B-serve "
    "DeepSeek-V3-Chat-serve",
    "Glm4Moe.yaml": "Glm4Moe-serve",
    "Hunyuan-A13B.yaml": "Hunyuan-serve-amx Hunyuan-serve",
    "Mixtral.yaml": "Mixtral",
    "Qwen2-57B-A14B-Instruct.yaml": "Qwen2-57B-A14B-Instruct Qwen2-57B-A14B-Instruct-multi-gpu",
    "Qwen2-serve.yaml": "Qwen2-serve Qwen2-serve-amx",
    "Qwen3Moe-ktransformers.yaml": "Qwen3-30B-A3B Qwen3Moe-ktransformers",
    "Qwen3Moe-serve.yaml": "Qwen3Moe-serve Qwen3Moe-serve-amx npu/Qwen3-Chat-300IA2-npu-serve",
}


def resolved(path: str) -> EngineConfig:
    return EngineConfig(model_path=DEMO_MODEL_PATH, optimize_config_path=Path(path)).resolved()


@pytest.mark.parametrize(
    ("shipped", "name"), [(file, name) for file, names in UPSTREAM.items() for name in names.split()]
)
def test_every_name_of_upstream(shipped: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    given = f"/nowhere/ktransformers/optimize/optimize_rules/{name}.yaml"
    with caplog.at_level(logging.INFO):
        config = resolved(given)
        again = config.resolved()
    assert config.optimize_config_path == shipped_path(shipped)
    assert again == config
    (record,) = caplog.records
    assert given in record.getMessage()
    assert shipped in record.getMessage()
    assert config.spread_layers is ("multi-gpu" in name)


def test_a_shipped_file_by_its_bare_name() -> None:
    assert resolved("Mixtral.yaml").optimize_config_path == shipped_path("Mixtral.yaml")


@pytest.mark.parametrize(
    "name",
    [
        "mine/DeepSeek-V3-Chat-multi-gpu.yaml",  # no folder of rules of ours or upstream's
        "DeepSeek-V3-Chatt.yaml",
        "optimize_rules/Llama4-serve.yaml",  # no family here
        "optimize_rules/Qwen3Next-serve.yaml",
        "optimize_rules/DeepSeek-V3-Chat-multi-gpu-8.json",
    ],
)
def test_other_names_stay_unknown(name: str) -> None:
    with pytest.raises(ConfigError, match=r"does not exist; shipped are .*DeepSeek-V3-Chat-serve\.yaml"):
        resolved(name)


def test_a_file_that_is_there_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "optimize_rules" / "DeepSeek-V3-Chat-multi-gpu-8.yaml"
    path.parent.mkdir()
    path.write_text("[]")
    config = resolved(str(path))
    assert config.optimize_config_path == path
    assert not config.spread_layers
