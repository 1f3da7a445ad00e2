"""The first lines of a chat: the machine that was found, the model, and where to go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ktransformers.system.cores import usable_cores

if TYPE_CHECKING:
    from ktransformers.engine.load.builder import Engine

__all__ = ["describe_machine", "describe_model"]

_TIERS = {
    "scalar": "no vector instructions",
    "avx2": "AVX2",
    "avx_vnni": "AVX2 with VNNI",
    "avx512_vnni": "AVX-512",
    "avx512_bf16": "AVX-512",
    "amx": "AMX",
    "neon_dotprod": "NEON",
    "neon_i8mm": "NEON",
}


def _gpus() -> list[str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = [torch.cuda.get_device_properties(index) for index in range(count)]
    return [f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus]


def _grouped(names: list[str]) -> str:
    return ", ".join(
        f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )


def describe_machine(use_cuda: bool | None) -> str:
    """Return in one line what a model can run on here: "No GPU found, 2 cores, AVX-512". use_cuda: EngineConfig's."""
    from ktransformers.kernels import cpu

    gpus = _gpus()
    gpu = _grouped(gpus) if gpus else "No GPU found"
    if gpus and use_cuda is False:
        gpu += " (not used: --no_use_cuda)"
    cores, tier = usable_cores(), cpu.active_isa().value
    return f"{gpu}, {cores} core{'s' * (cores > 1)}, {_TIERS.get(tier, tier)}"


def describe_model(engine: Engine) -> str:
    """Return the loaded model in one line: its file, its family, its cache."""
    path = engine.config.gguf_path or engine.config.model_path
    name = engine.description if path is None else f"{path.name or path} ({engine.facts.model_type})"
    return f"{name}, {engine.scheduler_config.max_len:,} tokens of context"
