"""A torchvision whose operators cannot be loaded: made of a few lines, as the real one fails beside another torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

META = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(boxes): return boxes
"""

SHOW = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from ktransformers.media.torchvision import prepare_torchvision
prepare_torchvision()
prepare_torchvision()
from transformers.utils import is_torchvision_available
print("available", is_torchvision_available())
if is_torchvision_available():
    import torchvision
else:
    from transformers import Qwen3MoeForCausalLM
"""


def shown(folder: Path, meta: str, init: str) -> list[str]:
    package = folder / "torchvision"
    package.mkdir()
    (package / "_C.so").write_bytes(b"no library")
    (package / "_meta_registrations.py").write_text(meta)
    (package / "__init__.py").write_text(init)
    about = folder / "torchvision-0.28.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    made = subprocess.run([sys.executable, "-c", SHOW], env=env, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    return made.stdout.splitlines()


def test_its_operators_are_declared(tmp_path: Path) -> None:
    lines = shown(tmp_path, META, "from torchvision import _meta_registrations\n__version__ = '0.28.0'\n")
    assert "built for another torch" in lines[0]
    assert len([line for line in lines if "built for another torch" in line]) == 1
    assert lines[-1] == "available True"


@pytest.mark.parametrize("error", ["RuntimeError", "ImportError"])
def test_one_that_fails_all_the_same_is_left_aside(tmp_path: Path, error: str) -> None:
    lines = shown(tmp_path, META, f"raise {error}('something else')\n")
    assert any("is left aside: something else" in line for line in lines)
    assert lines[-1] == "available False"
