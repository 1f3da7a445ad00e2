"""Finds the rule files that are shipped, and which of them a name of upstream's means.

Knows names, not what is in a file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["RULES_DIR", "ShippedRules", "find_shipped_rules", "is_shipped", "shipped_names", "shipped_path"]

RULES_DIR = Path(__file__).resolve().parent.parent / "optimize" / "optimize_rules"
"""The files whose names upstream's users know, and the generic ones that others include."""

_FAMILIES_DIR = RULES_DIR / "families"
"""The files of families that upstream has no file of this name for."""

_UPSTREAM_NAMES = (
    # beginning of upstream's names: our file, and the one for many requests at once
    ("DeepSeek-V2-Lite-Chat", "DeepSeek-V2-Lite-Chat.yaml", None),
    ("DeepSeek-V2-Chat", "DeepSeek-V2-Chat.yaml", None),
    ("DeepSeek-V3-Chat", "DeepSeek-V3-Chat.yaml", "DeepSeek-V3-Chat-serve.yaml"),
    ("Moonlight-16B-A3B", "DeepSeek-V3-Chat.yaml", "DeepSeek-V3-Chat-serve.yaml"),
    ("Glm4Moe", "Glm4Moe.yaml", None),
    ("Hunyuan", "Hunyuan-A13B.yaml", None),
    ("Mixtral", "Mixtral.yaml", None),
    ("Qwen2-57B-A14B-Instruct", "Qwen2-57B-A14B-Instruct.yaml", "Qwen2-serve.yaml"),
    ("Qwen2", "Qwen2-57B-A14B-Instruct.yaml", "Qwen2-serve.yaml"),
    ("Qwen3-30B-A3B", "Qwen3Moe-ktransformers.yaml", "Qwen3Moe-serve.yaml"),
    ("Qwen3-Chat", "Qwen3Moe-ktransformers.yaml", "Qwen3Moe-serve.yaml"),
    ("Qwen3Moe", "Qwen3Moe-ktransformers.yaml", "Qwen3Moe-serve.yaml"),
)
# Hardware, kernels and types of weights: what upstream has files of their own for, and an operator here finds out.
_VARIANT = r"(?:-(?:multi-gpu(?:-\d+)?|gpu-cpu|marlin|fp8-linear-ggml-experts|amx|defer|serve|dcu|xpu|npu|300IA2))*"


@dataclass(frozen=True, slots=True)
class ShippedRules:
    """A rule file that is shipped. is_spread: the name asked for is one for several GPUs."""

    path: Path
    is_spread: bool


def shipped_names() -> list[str]:
    """Return the names of all shipped rule files, in order."""
    return sorted(path.name for path in RULES_DIR.rglob("*.yaml"))


def shipped_path(name: str) -> Path:
    """Return where the shipped file called `name` ("Mixtral.yaml", without folders) would be; it may not exist."""
    of_family = _FAMILIES_DIR / name
    return of_family if of_family.is_file() else RULES_DIR / name


def is_shipped(path: Path) -> bool:
    """Whether `path` is one of the shipped files, here or in another copy of this program, such as a clone of it."""
    folder = path.absolute().parent
    if folder.name == _FAMILIES_DIR.name:
        folder = folder.parent
    return folder.name == RULES_DIR.name and shipped_path(path.name).is_file()


def find_shipped_rules(path: Path) -> ShippedRules | None:
    """Return the shipped file that `path`, which does not exist, means; None when it means none.

    It has a shipped or an upstream file's name, and no folder or one called optimize_rules.
    """
    if path.suffix != ".yaml" or (len(path.parts) > 1 and RULES_DIR.name not in path.parts):
        return None
    if shipped_path(path.name).is_file():
        return ShippedRules(shipped_path(path.name), False)
    for start, single, serving in _UPSTREAM_NAMES:
        if re.fullmatch(start + _VARIANT, path.stem, re.IGNORECASE):
            name = serving if serving is not None and "-serve" in path.stem else single
            return ShippedRules(shipped_path(name), "-multi-gpu" in path.stem)
    return None
