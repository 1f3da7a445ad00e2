"""The checks of doctor about system settings: huge pages, clocks, NUMA, memory modules, hyper-threads, mitigations.

Reads files below `root` alone, so that tests make up machines. What a file does not say is said to be unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ktransformers.cli.doctor.findings import Check, Finding, ok, warning
from ktransformers.cli.doctor.smbios import MemoryModule, memory_modules

__all__ = [
    "governor",
    "huge_pages",
    "judge_modules",
    "memory_channels",
    "mitigations",
    "numa",
    "smt",
    "system_checks",
    "turbo",
]

ROOT = Path("/")
GIB = 1 << 30
CPU = "sys/devices/system/cpu"
_FAR = 2.5  # times the distance to the own node: memory there is read at less than half the rate


def system_checks(root: Path = ROOT) -> list[Check]:
    """Return the checks of the system's settings in the order of the report."""
    named = {
        "huge pages": huge_pages,
        "governor": governor,
        "turbo": turbo,
        "smt": smt,
        "numa": numa,
        "memory channels": memory_channels,
        "mitigations": mitigations,
    }
    return [Check(name, lambda look=look: look(root)) for name, look in named.items()]  # type: ignore[misc]


def text_of(file: Path) -> str | None:
    """Return a file's text without white space around it; None where the file is missing or may not be read."""
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return None


def number_of(file: Path) -> int | None:
    """Return the whole number in a file; None where there is no file, or no number in it."""
    text = text_of(file)
    return int(text) if text is not None and text.lstrip("-").isdigit() else None


def huge_pages(root: Path = ROOT) -> Iterable[Finding]:
    """Check huge pages: transparent ones spare large matrices entries of the TLB; reserved ones lie idle."""
    modes = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    reserved = _reserved_bytes(root)
    if modes is None:
        yield ok("huge pages", "this system does not say")
        return
    chosen = modes[modes.find("[") + 1 : modes.find("]")] if "[" in modes else modes
    if chosen == "never":
        yield warning("huge pages", "transparent huge pages are off: reading weights is slower",
                      "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled")  # fmt: skip
    elif reserved > GIB:
        yield warning("huge pages", f"{chosen}; {reserved / GIB:.1f} GiB are reserved for programs that ask for them, "
                      "which weights do not", "sudo sysctl vm.nr_hugepages=0")  # fmt: skip
    else:
        yield ok("huge pages", f"{chosen}, {'none' if not reserved else f'{reserved >> 20} MiB'} reserved")


def _reserved_bytes(root: Path) -> int:
    """Free pages of all sizes that the system keeps apart."""
    total = 0
    for folder in (root / "sys/kernel/mm/hugepages").glob("hugepages-*kB"):
        size = folder.name.removeprefix("hugepages-").removesuffix("kB")
        total += (number_of(folder / "free_hugepages") or 0) * int(size) * 1024
    return total


def governor(root: Path = ROOT) -> Iterable[Finding]:
    """Check the governor that chooses the CPU's clock."""
    found = {text_of(file) for file in (root / CPU).glob("cpu[0-9]*/cpufreq/scaling_governor")} - {None}
    if not found:
        return [ok("governor", "this system does not say (virtual machines do not)")]
    names = ", ".join(sorted(str(name) for name in found))
    if found != {"performance"}:
        return [warning("governor", f"{names}: cores take their time to reach full clock between steps",
                        "sudo cpupower frequency-set -g performance")]  # fmt: skip
    return [ok("governor", names)]


def turbo(root: Path = ROOT) -> Iterable[Finding]:
    """Check whether clocks may rise above the base; Intel's file says it the other way round."""
    intel, other = f"{CPU}/intel_pstate/no_turbo", f"{CPU}/cpufreq/boost"
    for name, off in ((intel, 1), (other, 0)):
        value = number_of(root / name)
        if value is not None and value == off:
            return [warning("turbo", "off: cores stay at their base clock", f"echo {1 - off} | sudo tee /{name}")]
        if value is not None:
            return [ok("turbo", "on")]
    return [ok("turbo", "this system does not say")]


def smt(root: Path = ROOT) -> Iterable[Finding]:
    """Report whether hyper-threads are on; they cost nothing when they are left alone, as they are."""
    active = number_of(root / CPU / "smt/active")
    if active is None:
        return [ok("smt", "this system does not say")]
    return [ok("smt", "on; there is one worker for each core" if active else "off")]


def numa(root: Path = ROOT) -> Iterable[Finding]:
    """Report the NUMA nodes, how far they are from each other, and whether the system moves pages between them."""
    folders = sorted((root / "sys/devices/system/node").glob("node[0-9]*"), key=lambda folder: int(folder.name[4:]))
    if len(folders) < 2:
        yield ok("numa", "one node")
        return
    rows = [[int(word) for word in (text_of(folder / "distance") or "").split()] for folder in folders]
    far = max((distance for row in rows for distance in row), default=0)
    shown = f", {far / 10:g} times as far as the own at most" if far else ""
    yield ok("numa", f"{len(folders)} nodes{shown}; each gets a share of every expert")
    if far / 10 > _FAR:
        yield warning("numa distance", f"{far / 10:g} times: some nodes are two sockets apart",
                      "numactl --cpunodebind=0 --membind=0 ktransformers ..., if the model fits there")  # fmt: skip
    empty = [folder.name for folder in folders if _is_without_memory(folder)]
    if empty:
        yield warning("numa memory", f"{', '.join(empty)} without memory of its own: its cores read from elsewhere",
                      "put modules into its slots, or start with numactl --cpunodebind of the others")  # fmt: skip
    if number_of(root / "proc/sys/kernel/numa_balancing"):
        yield warning("numa balancing", "on: the system moves pages that already are where they belong",
                      "sudo sysctl kernel.numa_balancing=0")  # fmt: skip


def _is_without_memory(folder: Path) -> bool:
    """A node of processors only. Those of memory only (CXL) are none."""
    lines = (text_of(folder / "meminfo") or "").splitlines()
    totals = [line.split() for line in lines if "MemTotal:" in line]
    has_cpus = bool(text_of(folder / "cpulist"))
    return has_cpus and bool(totals) and totals[0][-2] == "0"


def memory_channels(root: Path = ROOT) -> Iterable[Finding]:
    """Count memory modules by the firmware's tables or the memory controllers' driver; both may be closed to a user."""
    table = root / "sys/firmware/dmi/tables/DMI"
    try:
        return judge_modules(memory_modules(table.read_bytes()))
    except OSError:
        pass
    found = set()
    for folder in (root / "sys/devices/system/edac/mc").glob("mc*/dimm*"):
        place = (text_of(folder / "dimm_location") or "").split()
        if number_of(folder / "size"):
            found.add((folder.parent.name, *place[:2]))
    if found:
        return [ok("memory channels", f"{len(found)} with modules, by the memory controllers' driver")]
    if table.exists():
        return [ok("memory channels", "not readable for this user; sudo dmidecode -t memory shows them")]
    return [ok("memory channels", "this system does not say (virtual machines do not)")]


def judge_modules(modules: list[MemoryModule]) -> list[Finding]:
    """Judge the memory modules by how many of the slots they fill and how fast they run."""
    held = [one for one in modules if one.nbytes]
    if not held:
        return [ok("memory channels", "this system does not say (virtual machines do not)")]
    total, rates = sum(one.nbytes for one in held), sorted({one.configured for one in held if one.configured})
    at = f" at {'/'.join(map(str, rates))} MT/s" if rates else ""
    text = f"{len(held)} of {len(modules)} slots hold modules{at}, {total / GIB:.0f} GiB"
    slow = [one for one in held if one.rated and one.configured and one.configured < one.rated]
    if slow:
        rated = max(one.rated for one in slow)
        return [warning("memory channels", f"{text}; modules are made for {rated} MT/s",
                        "choose the memory's profile (XMP, EXPO) in the firmware's setup; two modules in a channel "
                        "may have to run slower")]  # fmt: skip
    if len(held) == 1 and len(modules) > 1:
        return [warning("memory channels", f"{text}: one channel does all the work",
                        "put a second module of the same kind into a slot of another channel")]  # fmt: skip
    if len({one.nbytes for one in held}) > 1:
        return [warning("memory channels", f"{text}, of several sizes: a part of them is read from fewer channels",
                        "use modules of one size")]  # fmt: skip
    return [ok("memory channels", text)]


def mitigations(root: Path = ROOT) -> Iterable[Finding]:
    """Check mitigations: most cost at system calls, of which a step has few; one slows the gathers of AVX."""
    folder = root / CPU / "vulnerabilities"
    states = {file.name: text_of(file) or "" for file in sorted(folder.glob("*"))}
    if not states:
        return [ok("mitigations", "this system does not say")]
    active = [name for name, state in states.items() if state.startswith("Mitigation")]
    if states.get("gather_data_sampling", "").startswith("Mitigation"):
        return [warning("mitigations", f"{len(active)} are on; that of gather_data_sampling slows gathers of AVX",
                        "boot with gather_data_sampling=off, if all programs here are yours")]  # fmt: skip
    return [ok("mitigations", f"{len(active)} are on, none that slows the kernels")]
