"""A build that lacks tiers of the machine: native ones are compiled for one processor, and copied to a better one."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from ktransformers.errors import ConfigError
from ktransformers.kernels.cpu import Isa, active_isa, available_isas, base, lacking_isa
from ktransformers.kernels.cpu.base import ISA_VARIABLE, REBUILD


class Build:
    """The extension of a build with `available` tiers on a machine that has `missing` ones besides."""

    def __init__(self, available: list[str], missing: list[str]):
        self.available_isas = lambda: available
        self.missing_isas = lambda: missing


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv(ISA_VARIABLE, raising=False)
    base._report_lacking_isa.cache_clear()
    yield monkeypatch
    base._report_lacking_isa.cache_clear()


def test_this_build_has_the_fastest_tier_of_the_machine_that_compiled_it() -> None:
    assert lacking_isa() is None
    assert not {isa.value for isa in available_isas()} & set(base.extension.missing_isas())


def test_a_build_without_the_fastest_tier_says_so_once(
    build: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    build.setattr(base, "extension", Build(["scalar", "avx2"], ["avx512_vnni", "amx"]))
    assert lacking_isa() is Isa.AMX
    with caplog.at_level(logging.WARNING):
        assert active_isa() is Isa.AVX2
        assert active_isa() is Isa.AVX2
    (record,) = caplog.records
    text = record.getMessage()
    assert text.startswith("kernels run on avx2: this build lacks amx, which this machine has")
    assert text.endswith(REBUILD)


def test_a_build_without_slower_tiers_says_nothing(build: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    build.setattr(base, "extension", Build(["scalar", "avx512_vnni", "amx"], ["avx2", "avx512_bf16"]))
    assert lacking_isa() is None
    assert active_isa() is Isa.AMX
    assert not caplog.records


def test_a_variable_that_names_a_tier_of_the_machine_alone(build: pytest.MonkeyPatch) -> None:
    build.setattr(base, "extension", Build(["scalar", "amx"], ["avx2"]))
    build.setenv(ISA_VARIABLE, "avx2")
    with pytest.raises(ConfigError, match=r"KTRANSFORMERS_ISA=avx2: this build has scalar, amx; .*TIERS=all"):
        active_isa()
    build.setenv(ISA_VARIABLE, "avx512_bf16")
    with pytest.raises(ConfigError, match="this machine has scalar, amx"):
        active_isa()
