"""The nouns that the writer and the reader of a profile share: the parts of a step, the version of the files."""

from __future__ import annotations

__all__ = ["PARTS", "SCHEMA", "SCHEMA_VERSION"]

SCHEMA = "ktransformers-profile"
SCHEMA_VERSION = 1

PARTS = (
    "other",
    "norm",
    "linear",
    "attention",
    "router",
    "experts",
    "shared_experts",
    "mlp",
    "embedding",
    "lm_head",
    "sampling",
    "wait_cpu",
    "copy",
    "host",
)
"""What a step's time is told apart by; the number of a part in native records is its index here."""
