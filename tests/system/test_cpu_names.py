"""Names of processors in /proc/cpuinfo, which has none on aarch64."""

from __future__ import annotations

import pytest

from ktransformers.system.cpu_names import cpu_name, name_in

# As Linux prints it (Documentation/arch/arm64), shortened.
CORE = "processor\t: {}\nCPU implementer\t: {}\nCPU variant\t: 0x0\nCPU part\t: {}\nCPU revision\t: 1\n\n"


def cores(*numbers: tuple[str, str]) -> str:
    return "".join(CORE.format(i, maker, part) for i, (maker, part) in enumerate(numbers))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 106\nmodel name\t: Intel(R) Xeon(R)\n" * 2, "Intel(R) Xeon(R)"),
        (cores(*[("0x41", "0xd4f")] * 3), "Arm Neoverse-V2"),  # Grace, Graviton 4
        (cores(("0x41", "0xd87"), ("0x41", "0xd85"), ("0x41", "0xd87")), "Arm Cortex-A725, Arm Cortex-X925"),  # GB10
        (cores(("0xc0", "0xac3")), "Ampere AmpereOne"),
        (cores(("0x61", "0x023")), "Apple core 0x023"),
        (cores(("0x7f", "0x001")), "implementer 0x7f core 0x001"),
        ("processor\t: 0\nmodel name\t: \n", ""),
        ("", ""),
    ],
)
def test_names(text: str, name: str) -> None:
    assert name_in(text) == name


def test_this_machine_has_a_name() -> None:
    assert cpu_name()
