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
    monkeypatch.setattr(cores, "_allowed_cpus", lambda: set(range(2 * physical)))
    assert cores.usable_cores(tmp_path) == usable
    whole = 2 * physical if quota == "max" else max(min(2 * physical, int(quota) // 100000), 1)
    assert cores.usable_cpus(tmp_path) == whole
    line = cores.describe_quota(tmp_path)
    assert (line is None) == (usable == physical)
    assert line is None or f"{usable} worker threads" in line


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
