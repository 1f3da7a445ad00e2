"""Where the demo model lies: the GGUF and its eyes come with the package, the safetensors with the repository."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from ktransformers.config import DEMO_MODEL_PATH

__all__ = ["DEMO_CHECKPOINT", "DEMO_EYES", "DEMO_GGUF", "demo_with_eyes"]

DEMO_GGUF = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))), DEMO_MODEL_PATH / "missing.gguf")
# As Hugging Face stores a model: BF16 safetensors, configs, tokenizer, chat template.
DEMO_CHECKPOINT = Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "checkpoint"
# A composite's folder without the language model's weights, which are the GGUF's.
DEMO_EYES = DEMO_GGUF.with_suffix("")


def demo_with_eyes(folder: Path) -> None:
    """Make `folder` the whole model of safetensors: the checkpoint's text in a composite's names, and the tower."""
    shutil.copytree(DEMO_EYES, folder, dirs_exist_ok=True)
    text = load_file(DEMO_CHECKPOINT / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": tensor for name, tensor in text.items()}
    save_file(renamed, folder / "text.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys(renamed, "text.safetensors")
    names |= dict.fromkeys(load_file(folder / "vision.safetensors"), "vision.safetensors")
    index = {"metadata": {}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
