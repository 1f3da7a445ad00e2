"""The first lines of a chat."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ktransformers.cli.chat.greeting import describe_machine, describe_model
from ktransformers.kernels.cpu import Isa
from tests.support.engines.fake_runner import scripted_engine
from tests.support.servers.fake_chat import reply


@pytest.mark.parametrize(
    ("gpus", "cores", "isa", "use_cuda", "line"),
    [
        ([], 2, Isa.AVX512_VNNI, None, "No GPU found, 2 cores, AVX-512"),
        ([], 1, Isa.SCALAR, False, "No GPU found, 1 core, no vector instructions"),
        (["NVIDIA H200"], 16, Isa.AMX, None, "NVIDIA H200 140 GiB, 16 cores, AMX"),
        (["A", "A", "B"], 4, Isa.AVX2, True, "2 x A 140 GiB, B 140 GiB, 4 cores, AVX2"),
        (["A"], 4, Isa.AVX2, False, "A 140 GiB (not used: --no_use_cuda), 4 cores, AVX2"),
    ],
)
def test_the_machine(
    monkeypatch: pytest.MonkeyPatch, gpus: list[str], cores: int, isa: Isa, use_cuda: bool | None, line: str
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: bool(gpus))
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: SimpleNamespace(name=gpus[index], total_memory=140 << 30)
    )
    monkeypatch.setattr("ktransformers.kernels.cpu.active_isa", lambda: isa)
    monkeypatch.setattr("ktransformers.cli.chat.greeting.usable_cores", lambda: cores)
    assert describe_machine(use_cuda) == line


def test_the_model() -> None:
    engine = scripted_engine(reply)
    assert describe_model(engine) == "fake, 4,096 tokens of context"
    engine.config = replace(engine.config, gguf_path=Path("/models/m.gguf"))
    engine.facts = SimpleNamespace(model_type="qwen3_moe")
    assert describe_model(engine) == "m.gguf (qwen3_moe), 4,096 tokens of context"
