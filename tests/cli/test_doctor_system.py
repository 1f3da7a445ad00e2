"""Doctor's look at made-up machines: a Xeon with two nodes, an EPYC, a laptop, a container, an ARM server."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from ktransformers.cli.doctor import system
from ktransformers.cli.doctor.findings import Finding, Level
from ktransformers.cli.doctor.smbios import MemoryModule, memory_modules
from ktransformers.cli.doctor.speed import speed_findings
from ktransformers.optimize.machine_speed import CpuSpeed, Curve, GpuSpeed, MachineSpeed, Peak

GIB = 1 << 30
CPU, NODE, THP = "sys/devices/system/cpu", "sys/devices/system/node", "sys/kernel/mm/transparent_hugepage/enabled"

XEON = {
    THP: "always [madvise] never\n",
    "sys/kernel/mm/hugepages/hugepages-1048576kB/free_hugepages": "16\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "powersave\n",
    f"{CPU}/cpu10/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/intel_pstate/no_turbo": "1\n",
    f"{CPU}/smt/active": "1\n",
    f"{CPU}/vulnerabilities/gather_data_sampling": "Mitigation: Microcode\n",
    f"{CPU}/vulnerabilities/meltdown": "Not affected\n",
    f"{NODE}/node0/distance": "10 21\n",
    f"{NODE}/node1/distance": "21 10\n",
    f"{NODE}/node0/cpulist": "0-31\n",
    f"{NODE}/node1/cpulist": "32-63\n",
    f"{NODE}/node0/meminfo": "Node 0 MemTotal:       263000000 kB\n",
    f"{NODE}/node1/meminfo": "Node 1 MemTotal:       0 kB\n",
    "proc/sys/kernel/numa_balancing": "1\n",
    "sys/devices/system/edac/mc/mc0/dimm0/size": "32768\n",
    "sys/devices/system/edac/mc/mc0/dimm0/dimm_location": "channel 0 slot 0 \n",
    "sys/devices/system/edac/mc/mc0/dimm1/size": "32768\n",
    "sys/devices/system/edac/mc/mc0/dimm1/dimm_location": "channel 1 slot 0 \n",
}
EPYC = {
    THP: "[always] madvise never\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n",
    f"{CPU}/cpufreq/boost": "0\n",
    f"{CPU}/smt/active": "0\n",
    **{f"{NODE}/node{i}/distance": "10 12 32 32\n" for i in range(4)},
    f"{CPU}/vulnerabilities/spectre_v2": "Mitigation: Retpolines\n",
    "proc/sys/kernel/numa_balancing": "0\n",
}
LAPTOP = {
    THP: "always madvise [never]\n",
    f"{CPU}/cpu0/cpufreq/scaling_governor": "schedutil\n",
    f"{CPU}/intel_pstate/no_turbo": "0\n",
    f"{CPU}/smt/active": "1\n",
    f"{NODE}/node0/distance": "10\n",
}
ARM = {THP: "[madvise]\n", f"{CPU}/cpu0/cpufreq/scaling_governor": "performance\n", f"{NODE}/node0/cpulist": "0-79\n"}


def tree(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def warnings_of(root: Path) -> dict[str, Finding]:
    found = [finding for check in system.system_checks(root) for finding in check.run()]
    assert all(finding.remedy for finding in found if finding.level is not Level.OK)
    return {finding.name: finding for finding in found if finding.level is Level.WARNING}


@pytest.mark.parametrize(
    ("files", "remedies"),
    [
        (
            XEON,
            {
                "huge pages": "sudo sysctl vm.nr_hugepages=0",
                "governor": "sudo cpupower frequency-set -g performance",
                "turbo": f"echo 0 | sudo tee /{CPU}/intel_pstate/no_turbo",
                "numa memory": "put modules into its slots, or start with numactl --cpunodebind of the others",
                "numa balancing": "sudo sysctl kernel.numa_balancing=0",
                "mitigations": "boot with gather_data_sampling=off, if all programs here are yours",
            },
        ),
        (
            EPYC,
            {
                "turbo": f"echo 1 | sudo tee /{CPU}/cpufreq/boost",
                "numa distance": "numactl --cpunodebind=0 --membind=0 ktransformers ..., if the model fits there",
            },
        ),
        (
            LAPTOP,
            {
                "huge pages": "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
                "governor": "sudo cpupower frequency-set -g performance",
            },
        ),
        (ARM, {}),
        ({}, {}),  # a container that shows nothing
    ],
    ids=["xeon", "epyc", "laptop", "arm", "container"],
)
def test_machines(files: Mapping[str, str], remedies: Mapping[str, str], tmp_path: Path) -> None:
    found = warnings_of(tree(tmp_path, files))
    assert {name: finding.remedy for name, finding in found.items()} == remedies


def test_what_is_well_is_said_too(tmp_path: Path) -> None:
    root = tree(tmp_path, XEON)
    texts = {finding.name: finding.text for check in system.system_checks(root) for finding in check.run()}
    assert texts["smt"].startswith("on;")
    assert texts["numa"].startswith("2 nodes, 2.1 times as far")
    assert texts["memory channels"] == "2 with modules, by the memory controllers' driver"
    assert texts["numa memory"].startswith("node1 without memory")


def test_tables_that_are_closed_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "sys/firmware/dmi/tables/DMI").mkdir(parents=True)  # cannot be read, whoever asks
    (finding,) = system.memory_channels(tmp_path)
    assert "sudo dmidecode -t memory" in finding.text


def slot(name: str, mib: int, rated: int = 4800, configured: int = 4800, length: int = 0x28) -> bytes:
    """A structure of type 17 as DSP0134 lays it out."""
    data = bytearray(0x28)
    data[0], data[1] = 17, length
    struct.pack_into("<H", data, 0x0C, 0x7FFF if mib >= 0x7FFF else mib)
    data[0x10] = 1
    struct.pack_into("<H", data, 0x15, rated)
    struct.pack_into("<I", data, 0x1C, mib if mib >= 0x7FFF else 0)
    struct.pack_into("<H", data, 0x20, configured)
    return bytes(data[:length]) + name.encode() + b"\0\0"


OTHER, END = bytes([1, 4, 0, 0]) + b"maker\0\0", bytes([127, 4, 0, 0, 0, 0])


def test_memory_modules_are_read_from_the_firmware() -> None:
    table = OTHER + slot("DIMM_A1", 65536) + slot("DIMM_A2", 0, 0, 0) + slot("DIMM_B1", 16384, 5600, 4000) + END
    assert memory_modules(table + slot("behind the end", 1)) == [
        MemoryModule("DIMM_A1", 64 * GIB, 4800, 4800),
        MemoryModule("DIMM_A2", 0, 0, 0),
        MemoryModule("DIMM_B1", 16 * GIB, 5600, 4000),
    ]
    old = memory_modules(slot("old", 4096, length=0x1B) + END)
    assert old == [MemoryModule("old", 4 * GIB, 4800, 0)]


def test_a_table_that_is_cut_off_gives_what_is_whole() -> None:
    table = slot("A", 1024) + slot("B", 1024)
    for size in range(len(table)):
        assert len(memory_modules(table[:size])) == (size >= len(table) // 2)
    assert memory_modules(bytes([17, 0, 0, 0, 0, 0])) == []


@pytest.mark.parametrize(
    ("modules", "remedy"),
    [
        ([MemoryModule("A", GIB, 4800, 4800), MemoryModule("B", GIB, 4800, 4800)], ""),
        ([MemoryModule("A", GIB, 5600, 4000), MemoryModule("B", GIB, 5600, 4000)], "XMP"),
        ([MemoryModule("A", GIB, 0, 0), MemoryModule("B", 0, 0, 0)], "second module"),
        ([MemoryModule("A", GIB, 0, 0), MemoryModule("B", 2 * GIB, 0, 0)], "one size"),
        ([], ""),
    ],
)
def test_modules(modules: list[MemoryModule], remedy: str) -> None:
    (finding,) = system.judge_modules(modules)
    assert remedy in finding.remedy
    assert (finding.level is Level.WARNING) == bool(remedy)


CURVE = Curve((1.0,), (1 / 30e9,))
EIGHT = CpuSpeed(
    threads=8,
    isa="amx",
    read={1: 20e9, 8: 120e9},
    node_read={0: 60e9, 1: 60e9},
    peaks={"int8": Peak(1e12, 8e12), "bf16": Peak(0.0, 0.0)},
    experts={"Q4_K": CURVE},
)
H200 = GpuSpeed("H200", 4e12, 700e12, 50e9, 50e9, 2e-6, 9e-6)


@pytest.mark.parametrize(
    ("cpu", "gpu", "warned"),
    [
        (EIGHT, H200, []),
        (replace(EIGHT, read={1: 20e9, 4: 130e9, 8: 90e9}), H200, ["read bandwidth"]),
        (replace(EIGHT, node_read={0: 60e9, 1: 30e9}), H200, ["node bandwidth"]),
        (replace(EIGHT, peaks={"int8": Peak(1e12, 3e12)}), H200, ["arithmetic"]),
        (EIGHT, replace(H200, from_gpu=6e9), ["cuda:0 pcie"]),
    ],
)
def test_what_is_slow_has_a_remedy(cpu: CpuSpeed, gpu: GpuSpeed, warned: list[str]) -> None:
    found = list(speed_findings(MachineSpeed(0.0, 9.0, cpu, {"cuda:0": gpu})))
    assert [finding.name for finding in found if finding.level is Level.WARNING] == warned
    assert all(bool(finding.remedy) == (finding.name in warned) for finding in found)
    shown = {finding.name: finding.text for finding in found}
    assert shown["experts"].endswith("Q4_K 30.0")
    assert "bf16" not in shown["arithmetic"]
