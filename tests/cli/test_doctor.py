"""Doctor's findings from facts that are made up, and the whole report on this machine."""

from __future__ import annotations

import argparse
import errno
import json
import socket
import sys
import types
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.bench.probe import measuring
from ktransformers.cli import main
from ktransformers.cli.doctor import command as doctor
from ktransformers.cli.doctor import gpu, machine, software
from ktransformers.cli.doctor.findings import Check, Finding, Level, examine, ok, problem, shown, warning
from ktransformers.optimize.machine_speed import CpuSpeed, Curve, MachineSpeed, SpeedFile
from ktransformers.system.disk_speed import DiskSpeed
from tests.support.engines import fake_flashinfer

GIB = 1 << 30
SPEED = MachineSpeed(
    measured_at=0.0,
    took=9.0,
    cpu=CpuSpeed(2, "avx2", {1: 20e9, 2: 40e9}, experts={"Q4_K": Curve((1.0,), (1 / 30e9,))}),
)


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_line_has_the_remedy() -> None:
    assert shown(warning("swap", "full", "close it")) == "warning  swap              full -> close it"
    assert shown(ok("swap", "none")) == "ok       swap              none"


def test_a_check_that_fails_is_a_finding() -> None:
    def fails() -> list[Finding]:
        raise ZeroDivisionError("no cores\nat all")

    found = only(examine(Check("cores", fails)))
    assert (found.level, found.name, found.text) == (Level.WARNING, "cores", "cannot be examined: no cores")


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ([ok("a", "b")], 0, "all is well"),
        ([warning("a", "b", "c"), warning("a", "b", "c")], 0, "2 warnings"),
        ([problem("a", "b", "c"), warning("a", "b", "c")], 1, "1 problem, 1 warning"),
    ],
)
def test_only_problems_fail(
    findings: list[Finding], code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "all_checks", lambda is_quick, model: [Check("a", lambda: findings)])
    monkeypatch.setattr(doctor, "_measured", lambda file, is_anew: SPEED)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.splitlines()[-1] == last
    assert main(["doctor", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert document["is_well"] == (code == 0)
    levels = [one["level"] for one in document["findings"]]
    assert levels[: len(findings)] == [finding.level.value for finding in findings]
    assert document["machine"]["cpu"]["read"] == {"1": 20e9, "2": 40e9}


def test_the_whole_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "_measured", lambda file, is_anew: SPEED)
    monkeypatch.setattr("ktransformers.bench.common.bandwidth.bandwidths", lambda *args, **options: {"cpu": 43e9})
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert doctor.run(argparse.Namespace(json=False, quick=False, measure=False)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if "cannot be examined" in line]
    shown_names = [line[9:26].strip() for line in lines[:-1]]
    for name in ("torch", "native extension", "instruction set", "cores", "memory", "port", "demo model", "gpu"):
        assert name in shown_names
    assert "ok       memory bandwidth  43.0 GB/s read by all cores together" in lines
    assert "ok       read bandwidth    GB/s read: 20.0 by 1, 40.0 by 2 threads" in lines
    assert f"{tmp_path / 'hub'}: " in "\n".join(lines)


@pytest.mark.parametrize(
    ("cuda", "is_available", "has_driver", "level"),
    [
        (None, False, False, Level.OK),
        (None, False, True, Level.WARNING),
        ("13.0", False, True, Level.PROBLEM),
        ("13.0", False, False, Level.OK),
        ("13.0", True, True, Level.OK),
    ],
)
def test_torch(cuda: str | None, is_available: bool, has_driver: bool, level: Level) -> None:
    assert software.judge_torch("2.13", cuda, is_available, has_driver).level is level


def test_distributions() -> None:
    here, there = Path("/a/ktransformers"), Path("/b/ktransformers")
    ours, theirs = software.Owner("ours", "1", here), software.Owner("theirs", "2", here)
    elsewhere = software.Owner("theirs", "2", there)
    assert only(software.judge_owners([ours], here)).level is Level.OK
    mixed = only(software.judge_owners([ours, theirs], here))
    assert mixed.level is Level.PROBLEM
    assert mixed.remedy.startswith("pip uninstall -y ours theirs")
    beside = only(software.judge_owners([ours, elsewhere], here))
    assert beside.level is Level.WARNING
    assert "/b/ktransformers" in beside.text


def test_distributions_are_found_by_their_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "other_name-0.4.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-name\nVersion: 0.4.1\n")
    (info / "RECORD").write_text("ktransformers/__init__.py,,\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert list(software.owners()) == [software.Owner("other-name", "0.4.1", tmp_path / "ktransformers")]


def test_native_extension(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(software.native_extension()).level is Level.OK
    monkeypatch.setitem(sys.modules, "ktransformers._native", None)
    missing = only(software.native_extension(tmp_path))
    assert missing.level is Level.PROBLEM
    assert missing.text.startswith("missing")
    (tmp_path / "_native.cpython-399-x86_64-linux-gnu.so").touch()
    assert "built for another Python: _native.cpython-399" in only(software.native_extension(tmp_path)).text


def test_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    from ktransformers.kernels.cpu import Isa

    monkeypatch.setattr("ktransformers.kernels.cpu.available_isas", lambda: (Isa.SCALAR, Isa.AVX2))
    monkeypatch.setattr("ktransformers.kernels.cpu.lacking_isa", lambda: None)
    assert only(software.instruction_set({})).text.startswith("avx2, without products of bf16")
    assert only(software.instruction_set({"KTRANSFORMERS_ISA": "avx2"})).level is Level.OK
    lower = only(software.instruction_set({"KTRANSFORMERS_ISA": "scalar"}))
    assert (lower.level, lower.remedy) == (Level.WARNING, "unset KTRANSFORMERS_ISA")
    assert only(software.instruction_set({"KTRANSFORMERS_ISA": "amx"})).level is Level.PROBLEM
    monkeypatch.setattr("ktransformers.kernels.cpu.available_isas", lambda: (Isa.SCALAR,))
    assert only(software.instruction_set({})).level is Level.WARNING
    monkeypatch.setattr("ktransformers.kernels.cpu.lacking_isa", lambda: Isa.AMX)
    lacking = only(software.instruction_set({}))
    assert (lacking.level, lacking.text) == (Level.WARNING, "scalar; this processor has amx, which this build lacks")
    assert lacking.remedy == "pip install --config-settings cmake.define.KTRANSFORMERS_TIERS=all ."


@pytest.mark.parametrize(
    ("name", "harmless", "harmful"),
    [
        ("OMP_NUM_THREADS", "8", "2"),
        ("MKL_NUM_THREADS", "8", "1"),
        ("OMP_WAIT_POLICY", "passive", "ACTIVE"),
        ("OMP_PROC_BIND", "false", "close"),
        ("KMP_AFFINITY", "", "compact"),
        ("CUDA_LAUNCH_BLOCKING", "0", "1"),
        ("TRITON_INTERPRET", "0", "1"),
        ("CUDA_VISIBLE_DEVICES", "0", "-1"),
    ],
)
def test_variables(name: str, harmless: str, harmful: str) -> None:
    assert only(software.variables({name: harmless}, 8)).level is Level.OK
    found = only(software.variables({name: harmful}, 8))
    assert (found.level, found.name, found.remedy) == (Level.WARNING, name, f"unset {name}")


def test_demo_model(tmp_path: Path) -> None:
    assert only(software.demo_model()).level is Level.OK
    assert only(software.demo_model(tmp_path)).text.startswith("missing")
    (tmp_path / "cut.gguf").write_bytes(next(software.DEMO_MODEL_PATH.glob("*.gguf")).read_bytes()[:-64])
    assert only(software.demo_model(tmp_path)).text.startswith("damaged")


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    levels = {finding.name: finding.level for finding in software.packages()}
    assert levels == {"transformers": Level.OK, "gguf": Level.PROBLEM, "safetensors": Level.OK}


def test_cores() -> None:
    assert machine.judge_cores(8, 16, 16, None, "x").level is Level.OK
    assert machine.judge_cores(8, 16, 16, 8.0, "x").level is Level.OK
    quota = machine.judge_cores(8, 16, 16, 2.5, "x")
    assert (quota.level, "quota is 2.5 of them: --cpu_infer is 2" in quota.text) == (Level.WARNING, True)
    assert "--cpu_infer is 1 by" in machine.judge_cores(8, 16, 16, 0.5, "x").text
    assert machine.judge_cores(4, 8, 16, None, "x").level is Level.WARNING
    assert machine.judge_cores(6, 8, 8, None, "x", 4).text == "6 physical (2 performance, 4 efficiency), 8 logical (x)"


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_quota_of_the_control_group(tmp_path: Path) -> None:
    write(tmp_path, "sys/fs/cgroup/cpu.max", "max 100000\n")
    assert "quota" not in only(machine.cores(tmp_path)).text
    write(tmp_path, "sys/fs/cgroup/cpu.max", "50000 100000\n")
    assert "quota is 0.5 of them: --cpu_infer is 1 by itself" in only(machine.cores(tmp_path)).text


def test_memory_and_swap(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\nHugePages_Total: 0\n")
    assert only(machine.memory(tmp_path)) == ok("memory", "60.0 of 64.0 GiB are free")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    for name, value in (("max", 8 * GIB), ("current", 7 * GIB)):
        write(tmp_path, f"sys/fs/cgroup/memory.{name}", str(value))
    write(tmp_path, "sys/fs/cgroup/memory.stat", "inactive_file 0\n")
    limited = only(machine.memory(tmp_path))
    assert limited.text == "1.0 of 8.0 GiB are free; the container's limit, of 64.0 GiB"
    assert limited.level is Level.WARNING
    assert machine.judge_swap({}) == [ok("swap", "none")]
    assert only(machine.judge_swap({"SwapTotal": 8 * GIB, "SwapFree": 7 * GIB})).level is Level.OK
    assert only(machine.judge_swap({"SwapTotal": 8 * GIB, "SwapFree": 2 * GIB})).level is Level.WARNING


@pytest.mark.parametrize(("rate", "level"), [(43e9, Level.OK), (4e9, Level.WARNING), (None, Level.WARNING)])
def test_bandwidth(rate: float | None, level: Level) -> None:
    rates = {} if rate is None else {"cpu": rate}
    assert only(machine.ram_bandwidth(lambda: rates)).level is level


def test_limits(tmp_path: Path) -> None:
    assert [finding.level for finding in machine.judge_limits(None, None)] == [Level.OK, Level.OK]
    locked, files = machine.judge_limits(8 << 20, 256)
    assert locked.text.startswith("8 MiB")
    assert files.level is Level.WARNING
    assert only(machine.shared_memory(tmp_path)).text == "this system has none"


def test_disks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {"cache": tmp_path / "a", "models": tmp_path / "b" / "c"}
    usage = types.SimpleNamespace(total=100 * GIB, free=50 * GIB)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    assert [finding.level for finding in machine.disks(folders)] == [Level.OK, Level.OK]
    usage.free = GIB
    cache, models = machine.disks(folders)
    assert (cache.level, models.level) == (Level.OK, Level.WARNING)
    assert "HF_HOME" in models.remedy
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert {finding.level for finding in machine.disks(folders)} == {Level.WARNING}


def test_disk_reads(tmp_path: Path) -> None:
    def read(rate: float, why: str | None = None) -> Finding:
        return only(machine.disk_reads(tmp_path, measure=lambda path: DiskSpeed(path, rate, why)))

    def failing(path: Path) -> DiskSpeed:
        raise OSError(errno.EIO, "Input/output error", str(path))

    assert list(machine.disk_reads(cache=tmp_path)) == []
    for name, size in (("small.gguf", 1 << 20), ("large.safetensors", 64 << 20), ("larger.bin", 65 << 20)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    assert list(machine.disk_reads(tmp_path / "small.gguf")) == []
    assert read(3.5e9).text == f"3.50 GB/s read from {tmp_path / 'large.safetensors'}"
    assert read(3.5e9, "no O_DIRECT").text.endswith("perhaps from the system's cache: no O_DIRECT")
    assert (read(0.2e9).level, read(0.2e9).name) == (Level.WARNING, "disk reads")
    assert only(machine.disk_reads(cache=tmp_path, measure=failing)).text.endswith("cannot be read: Input/output error")


def test_the_hub_cache_is_where_huggingface_hub_has_it() -> None:
    assert machine.hub_cache({"HF_HUB_CACHE": "/x", "HF_HOME": "/y"}) == Path("/x")
    assert machine.hub_cache({"HF_HOME": "/y"}) == Path("/y/hub")
    assert machine.hub_cache({"XDG_CACHE_HOME": "/z"}) == Path("/z/huggingface/hub")
    assert machine.hub_cache({}) == Path.home() / ".cache/huggingface/hub"


def test_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        found = only(machine.port(number))
    assert (found.level, found.remedy) == (Level.WARNING, f"ktransformers serve --port {number + 1}")


def test_gpu() -> None:
    assert gpu.judge_gpu("cuda:0", "X", (9, 0), 80 * GIB, 80 * GIB).level is Level.OK
    shared = gpu.judge_gpu("cuda:0", "X", (9, 0), 60 * GIB, 80 * GIB)
    assert (shared.level, "20.0 GiB are taken by others" in shared.text) == (Level.WARNING, True)
    assert gpu.judge_gpu("cuda:0", "X", (7, 5), 16 * GIB, 16 * GIB).level is Level.WARNING


class FakeDriver:
    """Of two devices, of which one has stream memory operations."""

    def __init__(self, name: str):
        self.name = name

    def memory_operations(self) -> str | None:
        return None if self.name == "cuda:0" else "the device has no stream memory operations"


def test_what_runs_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "mem_get_info": lambda device: ((79 + device.index) << 30, 80 << 30),
        "memory_reserved": lambda device: 0,
        "get_device_name": lambda device: f"Accelerator {device.index}",
        "get_device_capability": lambda device: (9, 0),
    }
    for name, fact in facts.items():
        monkeypatch.setattr(f"torch.cuda.{name}", fact)
    monkeypatch.setattr("ktransformers.kernels.transfer.cuda.CudaDriver", FakeDriver)
    monkeypatch.setattr("ktransformers.kernels.triton.common.runtime.is_interpreted", lambda: False)
    fake_flashinfer.install(monkeypatch)

    def texts() -> dict[str, str]:
        return {finding.name: finding.text for check in gpu.gpu_checks() for finding in examine(check)}

    found = texts()
    assert found["cuda:1"] == "Accelerator 1, compute capability 9.0, 80.0 of 80.0 GiB free"
    assert found["cuda:0 streams"] == "stream memory operations"
    assert found["cuda:1 streams"] == "host functions (the device has no stream memory operations)"
    assert found["flashinfer"].startswith("0.0-fake")
    fake_flashinfer.install(monkeypatch, capability=(7, 5))
    assert texts()["flashinfer"].startswith("not used: cuda:0 has compute capability 7.5")
    monkeypatch.setattr("ktransformers.kernels.triton.common.runtime.triton", None)
    assert only(gpu.triton()).level is Level.PROBLEM


def test_quick_shows_what_was_measured_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = [ok("a", "quick")]
    monkeypatch.setattr(doctor, "all_checks", lambda is_quick, model: [Check("a", lambda: found * is_quick)])
    monkeypatch.setattr("ktransformers.bench.probe.measuring.measure_machine", lambda say: SPEED)
    assert main(["doctor", "--quick"]) == 0
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first.endswith("quick")
    assert second.startswith("warning  measured")
    assert second.endswith("ktransformers doctor --measure")
    assert main(["doctor"]) == 0
    assert "20.0 by 1" in capsys.readouterr().out
    assert main(["doctor", "--quick"]) == 0
    assert "20.0 by 1" in capsys.readouterr().out
    assert main(["doctor", "--quick", "--measure"]) != 0
    assert "leave one of them out" in capsys.readouterr().err


def test_a_measurement_is_taken_again_only_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rates = iter([1e9, 2e9])

    def measure(say: object) -> MachineSpeed:
        return replace(SPEED, cpu=replace(SPEED.cpu, read={2: next(rates)}))

    monkeypatch.setattr(measuring, "measure_machine", measure)
    file = SpeedFile({}, tmp_path)
    found = [measuring.known_or_measured(file, is_anew=anew).cpu.best_read for anew in (False, False, True, False)]
    assert found == [1e9, 1e9, 2e9, 2e9]
