"""CPU quotas on made-up trees of control groups, and what follows from them. Expected numbers are written by hand."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from ktransformers import config
from ktransformers.config import why_crowded
from ktransformers.engine.load import builder, stages
from ktransformers.system import cores

V2 = "30 20 0:26 {top} /sys/fs/cgroup rw,nosuid,nodev - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 20 0:27 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 20 0:28 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 20 0:29 {top} /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)
HYBRID = V1 + "34 20 0:30 {top} /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"

V1_GROUPS = "9:memory:/{path}\n4:cpu,cpuacct:/{path}\n1:name=systemd:/other\n"


def tree(root: Path, files: dict[str, str]) -> Path:
    """The files of /proc and /sys/fs/cgroup, by their paths below /sys/fs/cgroup, or below / with a slash."""
    for name, text in files.items():
        path = root / (name[1:] if name.startswith("/") else f"sys/fs/cgroup/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def proc(cgroup: str, mounts: str, top: str = "/") -> dict[str, str]:
    return {
        "/proc/self/cgroup": cgroup,
        "/proc/self/mountinfo": "1 0 8:1 / / rw - ext4 /dev/sda rw\n" + mounts.format(top=top),
    }


def v1(folder: str, quota: int | str, period: int | str = 100000) -> dict[str, str]:
    base = f"cpu,cpuacct/{folder}".rstrip("/")
    return {f"{base}/cpu.cfs_quota_us": f"{quota}\n", f"{base}/cpu.cfs_period_us": f"{period}\n"}


SERVICE = proc("0::/system.slice/kt.service\n", V2)

TREES: dict[str, tuple[dict[str, str], float | None]] = {
    "nothing": ({}, None),
    "v2 in a container": (proc("0::/\n", V2) | {"cpu.max": "150000 100000\n"}, 1.5),
    "v2 without a limit": (proc("0::/\n", V2) | {"cpu.max": "max 100000\n"}, None),
    "v2 the quota alone": (proc("0::/\n", V2) | {"cpu.max": "300000\n"}, 3.0),
    "v2 another period": (proc("0::/\n", V2) | {"cpu.max": "20000 10000\n"}, 2.0),
    "v2 systemd's CPUQuota": (SERVICE | {"system.slice/kt.service/cpu.max": "200000 100000"}, 2.0),
    "v2 of the slice": (
        SERVICE | {"system.slice/kt.service/cpu.max": "max 100000", "system.slice/cpu.max": "350000 100000"}, 3.5,
    ),
    "v2 the smallest is above": (
        SERVICE | {"system.slice/kt.service/cpu.max": "400000 100000", "system.slice/cpu.max": "100000 100000"}, 1.0,
    ),
    "v2 the smallest is below": (
        SERVICE | {"system.slice/kt.service/cpu.max": "50000 100000", "system.slice/cpu.max": "100000 100000"}, 0.5,
    ),
    "v2 a neighbour's limit": (SERVICE | {"system.slice/other.service/cpu.max": "100000 100000"}, None),
    "v2 groups without files": (
        proc("0::/a/b/c/d\n", V2) | {"a/cpu.max": "700000 100000", "a/b/c/cpu.max": "800000 100000"}, 7.0,
    ),
    "v2 a group of the host, bound": (
        proc("0::/kubepods/pod1/box\n", V2, top="/kubepods/pod1/box") | {"cpu.max": "250000 100000"}, 2.5,
    ),
    "v2 a group below the bound one": (
        proc("0::/kubepods/pod1/box/inner\n", V2, top="/kubepods/pod1/box")
        | {"cpu.max": "max 100000", "inner/cpu.max": "125000 100000"}, 1.25,
    ),
    "v2 another namespace": (proc("0::/../../elsewhere\n", V2) | {"cpu.max": "600000 100000"}, 6.0),
    "v1": (proc(V1_GROUPS.format(path=""), V1) | v1("", 250000), 2.5),
    "v1 without a limit": (proc(V1_GROUPS.format(path=""), V1) | v1("", -1), None),
    "v1 docker without namespaces": (
        proc(V1_GROUPS.format(path="docker/1f"), V1, top="/docker/1f") | v1("", 400000, 200000), 2.0,
    ),
    "v1 nested": (
        proc(V1_GROUPS.format(path="kube/pod/box"), V1) | v1("kube/pod/box", -1) | v1("kube/pod", 150000)
        | v1("kube", 900000), 1.5,
    ),
    "v1 without a period": (
        proc(V1_GROUPS.format(path=""), V1) | {"cpu,cpuacct/cpu.cfs_quota_us": "200000"}, 2.0,
    ),
    "v1 another controller's limit": (proc("3:cpuset:/x\n", V1) | {"cpuset/cpu.cfs_quota_us": "100000"}, None),
    "hybrid, limit in v1": (
        proc(V1_GROUPS.format(path="a") + "0::/a\n", HYBRID) | v1("a", 300000) | {"unified/a/cgroup.procs": ""}, 3.0,
    ),
    "hybrid, limit in v2": (
        proc(V1_GROUPS.format(path="a") + "0::/b\n", HYBRID)
        | v1("a", -1) | {"unified/b/cpu.max": "500000 100000"}, 5.0,
    ),
    "no list of mounts, v2": ({"/proc/self/cgroup": "0::/a\n", "a/cpu.max": "150000 100000"}, 1.5),
    "no /proc, v2": ({"cpu.max": "150000 100000"}, 1.5),
    "no /proc, v1": ({"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000"}, 1.5),
    "a folder with a blank": (
        proc("0::/\n", V2.replace("/sys/fs/cgroup", r"/sys/fs/my\040groups"))
        | {"/sys/fs/my groups/cpu.max": "100000 50000"}, 2.0,
    ),
    "nonsense": (proc("0::/\nx\n::\n", V2 + "what\n") | {"cpu.max": "many some\n"}, None),
    "a period of nothing": (proc("0::/\n", V2) | {"cpu.max": "100000 0\n"}, None),
    "an empty file": (proc("0::/\n", V2) | {"cpu.max": ""}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", TREES)
def test_the_smallest_quota_of_all_groups_wins(name: str, tmp_path: Path) -> None:
    files, quota = TREES[name]
    assert cores.cpu_quota(tree(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("quota", "physical", "usable"),
    [
        ("max", 8, 8),
        ("800000", 8, 8),
        ("900000", 8, 8),
        ("799999", 8, 7),
        ("250000", 8, 2),
        ("100000", 8, 1),
        ("99999", 8, 1),
        ("1000", 8, 1),
        ("300000", 2, 2),
    ],
)
def test_threads_by_quota_and_affinity(
    quota: str, physical: int, usable: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounded down, and at least one; never more than the affinity mask has."""
    tree(tmp_path, proc("0::/\n", V2) | {"cpu.max": f"{quota} 100000"})
    monkeypatch.setattr(cores, "physical_cores", lambda: physical)
    monkeypatch.setattr(cores, "allowed_cpus", lambda: set(range(2 * physical)))
    assert cores.usable_cores(tmp_path) == usable
    whole = 2 * physical if quota == "max" else max(min(2 * physical, int(quota) // 100000), 1)
    assert cores.usable_cpus(tmp_path) == whole
    line = cores.describe_quota(tmp_path)
    assert (line is None) == (usable == physical)
    assert line is None or f"{usable} worker threads" in line


def cpus(values: dict[str, list[str]]) -> dict[str, str]:
    """Files of CPUs 0, 1, ... below /sys/devices/system/cpu, by their names."""
    return {
        f"/sys/devices/system/cpu/cpu{cpu}/{name}": f"{text}\n"
        for name, texts in values.items()
        for cpu, text in enumerate(texts)
    }


INTEL = {"/sys/devices/cpu_core/cpus": "0-3\n", "/sys/devices/cpu_atom/cpus": "4-7\n"}
CLOCK, CAPACITY = "cpufreq/cpuinfo_max_freq", "cpu_capacity"

KINDS: dict[str, tuple[dict[str, str], str, str]] = {
    "nothing is known": ({}, "0-7", ""),
    "Intel's lists": (INTEL | cpus({CLOCK: ["5000000"] * 8}), "0-7", "4-7"),
    "Intel, a part of both": (INTEL, "3-5", "4-5"),
    "Intel, efficiency cores alone": (INTEL, "4-7", ""),
    "Intel, performance cores alone": (INTEL, "0-3", ""),
    "a list that is none": ({"/sys/devices/cpu_atom/cpus": "four\n"}, "0-7", ""),
    "Arm": (cpus({CAPACITY: ["250", "250", "800", "1024"], CLOCK: ["9", "9", "9", "9"]}), "0-3", "0-1"),
    "AMD": (cpus({CLOCK: ["5100000", "4900000", "3300000", "3300000"]}), "0-3", "2-3"),
    "cores of one kind, some of which clock higher": (cpus({CLOCK: ["5700000", "5200000"]}), "0-1", ""),
    "a clock is missing": (cpus({CLOCK: ["5100000"]}), "0-1", ""),
    "a clock is no number": (cpus({CLOCK: ["5100000", "fast"]}), "0-1", ""),
}


@pytest.mark.parametrize("name", KINDS)
def test_efficiency_cores(name: str, tmp_path: Path) -> None:
    files, allowed, slow = KINDS[name]
    found = cores.slow_cpus(cores.parse_cpu_list(allowed), tree(tmp_path, files))
    assert sorted(found) == cores.parse_cpu_list(slow)


def test_cpu_lists() -> None:
    assert cores.parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert cores.parse_cpu_list("") == []


def test_hyper_threads_count_once(tmp_path: Path) -> None:
    tree(tmp_path, cpus({"topology/thread_siblings_list": ["0,2", "1,3", "0,2", "1,3"]}))
    assert cores.count_cores(range(4), tmp_path) == 2
    assert cores.count_cores([0, 2], tmp_path) == 1
    assert cores.count_cores([4, 5], tmp_path) == 2


def test_what_decides_the_threads_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "physical_cores", lambda: 6)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cores, "allowed_cpus", lambda: set(range(8)))
    assert cores.describe_threads(6, tmp_path) is None
    tree(tmp_path, INTEL | cpus({"topology/thread_siblings_list": ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"]}))
    assert cores.describe_threads(6, tmp_path) == "6, on 2 performance and 4 efficiency cores"
    monkeypatch.setattr(cores, "allowed_cpus", lambda: set(range(7)))
    assert cores.describe_threads(5, tmp_path) == "5, by the affinity of this process to 7 of 8 CPUs"
    tree(tmp_path, proc("0::/\n", V2) | {"cpu.max": "250000 100000"})
    assert cores.describe_threads(2, tmp_path) == "2, by the control group's CPU quota of 2.5 of 6 cores"


def test_the_affinity_mask_counts() -> None:
    if hasattr(os, "sched_getaffinity"):
        assert 1 <= cores.usable_cores() <= cores.usable_cpus() <= len(os.sched_getaffinity(0))


def test_more_threads_than_the_quota_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("cpu_quota", 2.5), ("usable_cores", 2), ("usable_cpus", 2)):
        monkeypatch.setattr(config, name, lambda value=value: value)
    assert why_crowded(2) is None
    assert why_crowded(4) == (
        "4 worker threads share the 2.5 CPUs of this control group's quota; use 2, or leave the flag out"
    )


@pytest.mark.parametrize(("flag", "is_said"), [(0, True), (1, False)])
def test_one_line_of_the_log_says_that_the_quota_decided(
    flag: int, is_said: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stages, "describe_quota", lambda: "the quota decides")
    caplog.set_level(logging.INFO)
    engine = builder.build_engine(
        config.EngineConfig(gguf_path=config.bundled_model("there is one"), cache_lens=64, cpu_infer=flag).resolved()
    )
    engine.close()
    assert caplog.messages.count("the quota decides") == is_said
