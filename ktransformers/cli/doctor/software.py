"""The checks of doctor about installed software: Python, torch, the extension, packages, variables, bundled model."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ktransformers.cli.doctor.findings import Check, Finding, ok, problem, warning
from ktransformers.cli.parsing.options import version
from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.system.cores import usable_cores

__all__ = [
    "Owner",
    "demo_model",
    "instruction_set",
    "judge_owners",
    "judge_torch",
    "native_extension",
    "packages",
    "software_checks",
    "variables",
]

PACKAGE = Path(__file__).resolve().parents[2]
REINSTALL = "pip install --force-reinstall --no-deps ."
_MARK = "ktransformers/__init__.py"


def software_checks() -> list[Check]:
    """Return the checks of installed software in the order of the report."""
    return [
        Check("ktransformers", lambda: [ok("ktransformers", f"{version()}, in {PACKAGE}")]),
        Check("distributions", lambda: judge_owners(list(owners()), PACKAGE)),
        Check("python", lambda: [ok("python", f"{platform.python_version()} on {platform.platform()}")]),
        Check("torch", torch_build),
        Check("packages", packages),
        Check("native extension", native_extension),
        Check("instruction set", instruction_set),
        Check("variables", variables),
        Check("demo model", demo_model),
    ]


@dataclass(frozen=True, slots=True)
class Owner:
    """A distribution that brings a folder `ktransformers`."""

    name: str
    version: str
    folder: Path


def owners() -> Iterator[Owner]:
    """Yield the installed distributions that bring a folder `ktransformers`, by their lists of files."""
    for one in importlib.metadata.distributions():
        record = one.read_text("RECORD") or ""
        if record.startswith(_MARK) or f"\n{_MARK}" in record:
            folder = Path(str(one.locate_file("ktransformers"))).resolve()
            yield Owner(str(one.metadata["Name"]), one.version, folder)


def judge_owners(found: Sequence[Owner], package: Path) -> list[Finding]:
    """Judge the package's owners: two distributions in one folder mix files; one elsewhere may be imported instead."""
    here = [owner for owner in found if owner.folder == package]
    names = " and ".join(f"{owner.name} {owner.version}" for owner in here)
    findings = []
    if len(here) > 1:
        removed = " ".join(dict.fromkeys(owner.name for owner in here))
        findings.append(
            problem("distributions", f"{names} share {package}", f"pip uninstall -y {removed}, then install this one")
        )
    for owner in found:
        if owner.folder != package:
            text = f"{owner.name} {owner.version} in {owner.folder} is another ktransformers"
            findings.append(warning("distributions", text, f"pip uninstall {owner.name}, unless it is meant"))
    return findings or [ok("distributions", "no other ktransformers is installed")]


def torch_build() -> Iterable[Finding]:
    """Check torch, and whether it can see the GPU that the system has."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        yield problem("torch", f"cannot be imported ({error})", "pip install torch")
        return
    has_driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    yield judge_torch(str(torch.__version__), torch.version.cuda, torch.cuda.is_available(), has_driver)


def judge_torch(number: str, cuda: str | None, is_available: bool, has_driver: bool) -> Finding:
    """Judge torch's build. cuda: the version that torch was built for, None for a build without."""
    if cuda is None and has_driver:
        return warning("torch", f"{number} is built without CUDA, but there is an NVIDIA driver",
                       "pip install --force-reinstall torch, the build with CUDA")  # fmt: skip
    if cuda is not None and has_driver and not is_available:
        return problem("torch", f"{number} is built for CUDA {cuda} and cannot use the driver",
                       "nvidia-smi; a driver that is older than CUDA needs an update")  # fmt: skip
    build = "built without CUDA" if cuda is None else f"built for CUDA {cuda}"
    return ok("torch", f"{number}, {build}" + ("" if is_available or cuda is None else "; there is no NVIDIA driver"))


def packages() -> Iterable[Finding]:
    """Check the other packages without which nothing works: transformers, gguf, safetensors."""
    for name in ("transformers", "gguf", "safetensors"):
        try:
            importlib.import_module(name)
            yield ok(name, importlib.metadata.version(name))
        except (ImportError, OSError) as error:
            yield problem(name, f"cannot be imported ({error})", f"pip install {name}")


def native_extension(package: Path = PACKAGE) -> Iterable[Finding]:
    """Check whether the native extension is there, and built for this interpreter."""
    try:
        importlib.import_module("ktransformers._native")
    except ImportError as error:
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        others = sorted(file.name for file in package.glob("_native*") if not file.name.endswith(suffix))
        text = f"built for another Python: {', '.join(others)}, not {suffix}" if others else f"missing ({error})"
        yield problem("native extension", text, REINSTALL)
        return
    yield ok("native extension", "present, built for this Python")


def instruction_set(environ: Mapping[str, str] = os.environ) -> Iterable[Finding]:
    """Report which instruction set kernels use, and whether a variable keeps them from a better one."""
    from ktransformers.kernels import cpu

    known, forced = cpu.available_isas(), environ.get("KTRANSFORMERS_ISA", "")
    names = ", ".join(isa.value for isa in known)
    if forced and forced not in {isa.value for isa in known}:
        yield problem("instruction set", f"KTRANSFORMERS_ISA={forced}; this machine has {names}",
                      "unset KTRANSFORMERS_ISA")  # fmt: skip
        return
    best, lacking = known[-1].value, cpu.lacking_isa()
    if lacking is not None:
        yield warning("instruction set", f"{best}; this processor has {lacking.value}, which this build lacks",
                      cpu.REBUILD)  # fmt: skip
        return
    if forced and forced != best:
        yield warning("instruction set", f"{forced}, by KTRANSFORMERS_ISA; this processor has {best}",
                      "unset KTRANSFORMERS_ISA")  # fmt: skip
        return
    if best == "scalar":
        yield warning("instruction set", "scalar: no SIMD unit that kernels know, so everything is slow",
                      "use a processor with AVX2, or on Arm one with dot products (Armv8.2)")  # fmt: skip
        return
    bf16 = "with" if cpu.has_bf16(known[-1]) else "without"
    yield ok("instruction set", f"{best}, {bf16} products of bf16 (--cpu_prefill); of {names}")


def variables(environ: Mapping[str, str] = os.environ, cores: int | None = None) -> Iterable[Finding]:
    """Find environment variables that slow computing down."""
    cores, found = cores or usable_cores(), False
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        value = environ.get(name, "")
        if value.isdigit() and int(value) < cores:
            found = True
            yield warning(name, f"{value}: torch computes on fewer than {cores} cores", f"unset {name}")
    causes = (
        ("OMP_WAIT_POLICY", lambda v: v.lower() == "active", "torch's idle threads spin on the cores of the kernels"),
        ("OMP_PROC_BIND", lambda v: v.lower() not in ("", "false"), "threads of torch are bound to cores"),
        ("GOMP_CPU_AFFINITY", bool, "threads are bound to cores"),
        ("KMP_AFFINITY", bool, "threads are bound to cores"),
        ("CUDA_LAUNCH_BLOCKING", lambda v: v == "1", "every launch on a GPU waits"),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", lambda v: v == "1", "every tensor on a GPU is allocated anew"),
        ("TRITON_INTERPRET", lambda v: v not in ("", "0"), "GPU kernels are interpreted on the CPU, for tests only"),
    )
    for name, is_harmful, text in causes:
        if is_harmful(environ.get(name, "")):
            found = True
            yield warning(name, f"{environ[name]}: {text}", f"unset {name}")
    if environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        found = True
        yield warning("CUDA_VISIBLE_DEVICES", "hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if not found:
        yield ok("variables", "none that slows things down")


def demo_model(folder: Path = DEMO_MODEL_PATH) -> Iterable[Finding]:
    """Check whether the bundled model is there, all of it."""
    files = sorted(folder.glob("*.gguf"))
    if not files:
        yield problem("demo model", f"missing: no *.gguf in {folder}", REINSTALL)
        return
    from ktransformers.errors import KTransformersError
    from ktransformers.weights.gguf.file import open_gguf

    try:
        model = open_gguf(files[0])
    except (KTransformersError, OSError) as error:
        yield problem("demo model", f"damaged: {str(error).splitlines()[0]}", REINSTALL)
        return
    yield ok("demo model", f"{files[0].name}, {len(model.tensors)} tensors")
