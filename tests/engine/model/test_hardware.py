"""GPUs are used unless the configuration wants none, and nothing about that is silent."""

from __future__ import annotations

import logging

import pytest
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import Hardware
from ktransformers.engine.plan import hardware as hardware_of
from ktransformers.kernels.triton.common import runtime
from ktransformers.operators import device
from ktransformers.optimize.machine import Machine


def found(monkeypatch: pytest.MonkeyPatch, devices: dict[str, int], **settings: object) -> dict[str, int]:
    monkeypatch.setattr(hardware_of, "detect_machine", lambda: Machine(8, 4, devices))
    return dict(Hardware.detect(EngineConfig(**settings)).machine.devices)  # type: ignore[arg-type]


def test_gpus_are_used_unless_they_are_not_wanted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    both = {"cpu": 4, "cuda:0": 2}
    assert found(monkeypatch, both) == both
    assert found(monkeypatch, both, use_cuda=True) == both
    assert found(monkeypatch, both, use_cuda=False) == {"cpu": 4}
    assert found(monkeypatch, {"cpu": 4}) == {"cpu": 4}
    assert not caplog.text


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"use_cuda": True}, "--use_cuda"),
        ({"gpu_memory": 4.0}, "--gpu_memory"),
        ({"use_cuda_graph": True}, "--use_cuda_graph"),
    ],
)
def test_flags_without_a_gpu_are_said_to_be_idle(
    settings: dict[str, object], flag: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found(monkeypatch, {"cpu": 4}, **settings)
    assert f"{flag} has no effect (no GPU can be used on this machine)" in caplog.text
    if flag != "--use_cuda":
        found(monkeypatch, {"cpu": 4, "cuda:0": 2}, use_cuda=False, **settings)
        assert f"{flag} has no effect (--no_use_cuda)" in caplog.text


def test_a_core_is_left_to_the_thread_that_serves_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, with_gpu in ((16, 15), (3, 2), (2, 2), (1, 1)):
        monkeypatch.setattr(hardware_of, "usable_cores", lambda cores=cores: cores)
        assert Hardware(Machine(8, 4, {"cpu": 4})).num_threads == cores
        assert Hardware(Machine(8, 4, {"cpu": 4, "cuda:0": 2})).num_threads == with_gpu


def test_gpus_without_bf16_are_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(runtime, "available", lambda: None)
    values = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda index: (100 + index, 200),
        "get_device_capability": lambda index: [(7, 5), (8, 6)][index],
        "get_device_name": lambda index: ["an older one", "a newer one"][index],
    }
    for name, value in values.items():
        monkeypatch.setattr(torch.cuda, name, value)
    device._is_usable.cache_clear()
    assert device.cuda_memory() == {"cuda:1": 101}
    assert device.cuda_memory() == {"cuda:1": 101}
    device._is_usable.cache_clear()
    assert caplog.text.count("cuda:0 (an older one) is left alone: its compute capability is 7.5, below 8.0") == 1


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (3, 2), (7, 6), (8, 7), (16, 15)])
def test_a_service_has_a_core_of_many_for_its_other_processes(
    cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_of, "usable_cores", lambda: cores)
    assert Hardware(Machine(8, 4, {"cpu": 4, "cuda:0": 2}), is_served=True).num_threads == threads
    on_cpu = Hardware(Machine(8, 4, {"cpu": 4}), is_served=True)
    assert on_cpu.num_threads == (cores if cores < 8 else cores - 1)
