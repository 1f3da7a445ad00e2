"""Folders of tiny random models whose answers can be read: printable letters, and no end but that of the request."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch

NUM_LETTERS = 94
"""The first ids of tiny_tokenizer: from "!" to "~"."""


def let_speak(folder: Path, max_len: int = 4096) -> Path:
    """Rewrite the model of `folder`: its context holds `max_len` tokens, and greedily it says letters alone."""
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["max_position_embeddings"] = max_len
    (folder / "config.json").write_text(json.dumps(config))
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    weights["lm_head.weight"][NUM_LETTERS:] = 0  # of 94 random logits one is larger
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
