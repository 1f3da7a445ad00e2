"""Reads the processor's name. On x86 Linux knows it; on aarch64 it gives the numbers of Arm's register MIDR_EL1, which
the manuals of the cores assign (Arm Architecture Reference Manual, D24.2: Implementer, PartNum)."""

from __future__ import annotations

import platform
import re
from pathlib import Path

__all__ = ["cpu_name", "name_in"]

_IMPLEMENTERS = {
    "0x41": "Arm",
    "0x46": "Fujitsu",
    "0x48": "HiSilicon",
    "0x4e": "NVIDIA",
    "0x51": "Qualcomm",
    "0x61": "Apple",
    "0xc0": "Ampere",
}
_CORES = {
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
    ("0x41", "0xd84"): "Neoverse-V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0xc0", "0xac3"): "AmpereOne",
    ("0xc0", "0xac4"): "AmpereOne A",
}


def cpu_name() -> str:
    """Return the processor's model name, as far as the system tells."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    except OSError:
        cpuinfo = ""
    return name_in(cpuinfo) or platform.processor() or platform.machine()


def name_in(cpuinfo: str) -> str:
    """Return the processor's name in the text of /proc/cpuinfo, "" where it has none.

    A processor with several kinds of cores has the names of all, in the order of the CPUs: "Arm Cortex-X925, Arm
    Cortex-A725". A core that is not known by name has its number: "Apple core 0x023".
    """
    named = re.search(r"^model name\s*:[ \t]*(\S.*)$", cpuinfo, re.MULTILINE)
    if named:
        return named[1].strip()
    makers = re.findall(r"^CPU implementer\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE)
    parts = re.findall(r"^CPU part\s*:\s*(0x[0-9a-f]+)$", cpuinfo, re.MULTILINE)
    return ", ".join(_core_name(*core) for core in dict.fromkeys(zip(makers, parts, strict=False)))


def _core_name(maker: str, part: str) -> str:
    name = _IMPLEMENTERS.get(maker, f"implementer {maker}")
    return f"{name} {_CORES.get((maker, part), f'core {part}')}"
