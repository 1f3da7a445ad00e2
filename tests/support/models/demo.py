"""Where the demo model lies: the GGUF comes with the package, the safetensors with the repository."""

from __future__ import annotations

from pathlib import Path

from ktransformers.config import DEMO_MODEL_PATH

__all__ = ["DEMO_CHECKPOINT", "DEMO_GGUF"]

DEMO_GGUF = next(iter(sorted(DEMO_MODEL_PATH.glob("*.gguf"))), DEMO_MODEL_PATH / "missing.gguf")
# As Hugging Face stores a model: BF16 safetensors, configs, tokenizer, chat template.
DEMO_CHECKPOINT = Path(__file__).resolve().parents[3] / "examples" / "demo_model" / "checkpoint"
