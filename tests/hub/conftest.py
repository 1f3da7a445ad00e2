"""A hub of made-up bytes; nothing here reads them as weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.servers.hub_server import HubServer, Repo, hub_on_loopback

MIB = 1 << 20


def some_bytes(nbytes: int, seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(nbytes)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    repos = {
        "org/model-GGUF": Repo(
            {
                "README.md": b"# a model\n",
                "model-Q8_0.gguf": some_bytes(4 * MIB + 5, 0),
                "Q4_K_M/model-Q4_K_M-00001-of-00002.gguf": some_bytes(MIB, 1),
                "Q4_K_M/model-Q4_K_M-00002-of-00002.gguf": some_bytes(MIB // 2, 2),
                "mmproj-model-F16.gguf": b"x",
            },
            plain=frozenset({"README.md"}),
        ),
        "org/model": Repo(
            {
                "config.json": b'{"architectures": ["LlamaForCausalLM"]}',
                "model.safetensors": some_bytes(1000, 3),
                "pytorch_model.bin": b"pickle",
            },
            plain=frozenset({"config.json"}),
        ),
        "org/gated": Repo({"model-Q8_0.gguf": b"x" * 100}, access="gated"),
        "org/private": Repo({"model-Q8_0.gguf": b"x" * 100}, access="private"),
    }
    with hub_on_loopback(repos, tmp_path / "cache", monkeypatch) as server:
        yield server
