"""Memory limits, read from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from ktransformers.optimize.machine import Machine, detect_machine

MEMINFO = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    9000 kB\nHugePages_Total:       0\n"
KIB = 1024


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_control_groups(tmp_path: Path) -> None:
    machine = detect_machine(tree(tmp_path, {}), dict)
    assert machine == Machine(16000 * KIB, 9000 * KIB, {"cpu": 9000 * KIB})
    assert machine.default_device == "cpu"


def test_cgroup_v2_counts_droppable_cache_as_free(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": "max\n",
        "sys/fs/cgroup/pod/memory.current": "5000000\n",
        "sys/fs/cgroup/pod/memory.stat": "anon 1\n",
        "sys/fs/cgroup/pod/box/memory.max": f"{8000 * KIB}\n",
        "sys/fs/cgroup/pod/box/memory.current": f"{3000 * KIB}\n",
        "sys/fs/cgroup/pod/box/memory.stat": f"anon 5\ninactive_file {1000 * KIB}\n",
    }
    machine = detect_machine(tree(tmp_path, files))
    assert (machine.ram_bytes, machine.available_bytes) == (8000 * KIB, 6000 * KIB)


def test_cgroup_v2_limit_of_an_outer_group(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pod/box\n",
        "sys/fs/cgroup/pod/memory.max": f"{4000 * KIB}\n",
        "sys/fs/cgroup/pod/memory.current": f"{5000 * KIB}\n",
        "sys/fs/cgroup/pod/memory.stat": "inactive_file 0\n",
    }
    machine = detect_machine(tree(tmp_path, files))
    assert (machine.ram_bytes, machine.available_bytes) == (4000 * KIB, 0)


def test_cgroup_v1_with_a_path_of_the_host(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/docker/x\n2:memory:/docker/x\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2000 * KIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{500 * KIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {100 * KIB}\n",
    }
    machine = detect_machine(tree(tmp_path, files))
    assert (machine.ram_bytes, machine.available_bytes) == (2000 * KIB, 1600 * KIB)


@pytest.mark.parametrize("limit", ["9223372036854771712", "nonsense"])
def test_no_limit(tmp_path: Path, limit: str) -> None:
    files = {
        "proc/self/cgroup": "2:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": limit,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
    }
    assert detect_machine(tree(tmp_path, files)).available_bytes == 9000 * KIB


def test_broken_meminfo_falls_back(tmp_path: Path) -> None:
    machine = detect_machine(tree(tmp_path, {"proc/meminfo": "MemTotal: x\n"}))
    assert machine.ram_bytes == machine.available_bytes > 0


def test_this_machine() -> None:
    machine = detect_machine()
    assert 0 < machine.available_bytes <= machine.ram_bytes
    assert tuple(machine.devices) == ("cpu",)


def test_gpus_come_after_the_cpu_and_are_the_default(tmp_path: Path) -> None:
    machine = detect_machine(tree(tmp_path, {}), lambda: {"cuda:0": 5, "cuda:1": 7})
    assert machine.devices == {"cpu": 9000 * KIB, "cuda:0": 5, "cuda:1": 7}
    assert machine.default_device == "cuda:0"
