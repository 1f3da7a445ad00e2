"""Calibration on a made-up machine, and the file that remembers it."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.operators.device import STREAM_ROWS
from ktransformers.operators.experts.rates import CpuTimer, RatesFile, calibrate, measure_rates
from ktransformers.operators.experts.split import NEVER, CpuRate, PrefillRates
from ktransformers.operators.experts.streamed import PrefillShape
from ktransformers.system.user_folders import user_cache_dir

RATES = PrefillRates(5e-5, 1e-8, CpuRate((1, 8), (1e-5, 2e-5)), CpuRate((1, 8), (2e-5, 3e-5)))
KEY = {"cpu": "a", "threads": 2}


class Machine:
    """Time passes when something works: an expert takes the CPU 10 us and 1 us a row, 1.5 times as long beside copies,
    which take 50 us an expert, 80 us while the CPU works."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = 0.0
        self.calls: list[tuple[int, int]] = []

    def clock(self) -> float:
        return self.now


class Kernel:
    num_experts, hidden_size = 64, 32

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        counts = torch.bincount(ids.flatten(), minlength=64)
        assert x.shape == (ids.shape[0], 32)
        seconds = sum(1e-5 + 1e-6 * n for n in counts.tolist() if n)
        is_beside = self.machine.now < self.machine.ends
        self.machine.calls.append((int((counts > 0).sum()), int(counts.max())))
        self.machine.now += seconds * (1.5 if is_beside else 1.0)


class Prefill:
    shape = PrefillShape(64, 8, 32, 16, 1024)
    rates: PrefillRates | None = None
    threshold = NEVER
    least_rows = 2

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def group_size(self, layer: int) -> int:
        return 8

    def copy_seconds(self, layer: int, num_groups: int, meanwhile: Callable[[Callable[[], bool]], None]) -> float:
        began = self.machine.now
        self.machine.ends = began + num_groups * 8 * 8e-5
        meanwhile(lambda: self.machine.now >= self.machine.ends)
        is_busy = self.machine.now > began
        self.machine.now = max(self.machine.now, self.machine.ends)
        return 8e-5 if is_busy else 5e-5

    def gpu_seconds(self, layer: int) -> float:
        return 2e-8


def test_rates_are_those_of_the_machine() -> None:
    machine = Machine()
    timer = CpuTimer(Kernel(machine), 8, 1000, machine.clock)  # type: ignore[arg-type]
    rates = measure_rates(Prefill(machine), timer)  # type: ignore[arg-type]
    assert rates.cpu.rows == (1, 8, 32, 128)
    assert rates.cpu.seconds == pytest.approx([1e-5 + 1e-6 * n for n in (1, 8, 32, 128)])
    assert rates.shared_cpu.seconds == pytest.approx([1.5 * each for each in rates.cpu.seconds])
    assert (rates.copy, rates.gpu_row) == (pytest.approx(8e-5), 2e-8)
    assert {touched for touched, _ in machine.calls} == {64}
    assert machine.now < 0.5


def test_large_experts_are_measured_on_a_few() -> None:
    machine = Machine()
    timer = CpuTimer(Kernel(machine), 8, 100 << 20, machine.clock)  # type: ignore[arg-type]
    assert timer.num_touched == 10
    assert timer.seconds(8) == pytest.approx(1.8e-5)
    assert machine.calls[0] == (10, 8)


def test_measured_once_and_said_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine, file = Machine(), RatesFile(KEY, tmp_path)
    prefill = Prefill(machine)
    calibrate(prefill, Kernel(machine), 1000, file, machine.clock)  # type: ignore[arg-type]
    assert prefill.rates is not None
    assert prefill.threshold < NEVER
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"from {prefill.threshold} tokens of a step on" in line
    before, again = len(machine.calls), Prefill(machine)
    calibrate(again, Kernel(machine), 1000, RatesFile(KEY, tmp_path), machine.clock)  # type: ignore[arg-type]
    assert len(machine.calls) == before
    assert (again.rates, again.threshold) == (prefill.rates, prefill.threshold)
    assert "measured before" in caplog.records[-1].getMessage()
    again.least_rows = again.threshold + 5
    calibrate(again, Kernel(machine), 1000, RatesFile(KEY, tmp_path), machine.clock)  # type: ignore[arg-type]
    assert again.threshold == again.least_rows


def test_another_machine_has_another_file(tmp_path: Path) -> None:
    RatesFile(KEY, tmp_path).write(RATES)
    assert RatesFile(dict(reversed(KEY.items())), tmp_path).read() == RATES
    assert RatesFile({**KEY, "threads": 3}, tmp_path).read() is None
    assert [path.name for path in (tmp_path / "prefill-rates").iterdir()] == [RatesFile(KEY, tmp_path).path.name]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[:50],
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: text.replace("5e-05", "-1"),
        lambda text: text.replace("5e-05", "NaN"),
        lambda text: text.replace("5e-05", '"x"'),
        lambda text: text.replace('"rows": [1, 8]', '"rows": [8, 1]'),
        lambda text: text.replace('"copy"', '"cope"'),
        lambda text: json.dumps([1]),
        lambda text: "\xff",
    ],
)
def test_a_damaged_file_is_ignored_with_a_line(
    damage: Callable[[str], str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RatesFile(KEY, tmp_path)
    file.write(RATES)
    file.path.write_bytes(damage(file.path.read_text()).encode("latin-1"))
    assert file.read() is None
    assert len(caplog.records) == 1
    assert "measured anew" in caplog.text
    file.write(RATES)
    assert file.read() == RATES


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "prefill-rates").write_text("a file in the folder's place")
    RatesFile(KEY, tmp_path).write(RATES)
    assert "measured at every start" in caplog.text


def test_the_cache_folder_follows_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/u"))
    assert user_cache_dir("linux", {}) == Path("/home/u/.cache/ktransformers")
    assert user_cache_dir("linux", {"XDG_CACHE_HOME": "/x"}) == Path("/x/ktransformers")
    assert user_cache_dir("linux", {"XDG_CACHE_HOME": "x"}) == Path("/home/u/.cache/ktransformers")
    assert user_cache_dir("darwin", {"XDG_CACHE_HOME": "/x"}) == Path("/home/u/Library/Caches/ktransformers")
    assert user_cache_dir("win32", {"LOCALAPPDATA": "/l"}) == Path("/l/ktransformers/Cache")


def test_slots_raise_the_threshold_up_to_the_stream_s_steps(tmp_path: Path) -> None:
    """Steps of more rows than those that use slots by themselves are streamed whatever the slots."""
    file = RatesFile(KEY, tmp_path)
    cpu = CpuRate((1, 64), (1e-4, 4e-4))
    file.write(PrefillRates(5e-5, 0.0, cpu, cpu))
    found = []
    for num_held in (0, 40, 62):
        prefill = Prefill(Machine())
        prefill.shape = replace(Prefill.shape, num_held=num_held)
        calibrate(prefill, Kernel(prefill.machine), 1000, file)  # type: ignore[arg-type]
        found.append(prefill.threshold)
    assert found[0] < found[1] < found[2] == STREAM_ROWS + 1
