"""Every kind of file as the place of experts: the logits of an engine that has all of them in RAM."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ktransformers.config import EngineConfig
from tests.convert.test_pack_model import KINDS
from tests.engine.load.test_stored_experts import logits_of
from tests.support.checks.packed_experts import packed
from tests.support.engines.one_sequence import static_engine

_VOCABULARY = 64


def _linked(config: EngineConfig, folder: Path) -> EngineConfig:
    """The model as a hub's cache has it: links, to files with other names in another folder."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / "main"
    blobs.mkdir(), snapshot.mkdir(parents=True)
    source = config.model_path if config.gguf_path is None else config.gguf_path
    assert isinstance(source, Path)
    files = sorted(source.iterdir() if source.is_dir() else source.parent.glob("*.gguf"))
    for number, file in enumerate(file for file in files if file.is_file()):
        (snapshot / file.name).symlink_to(shutil.copy(file, blobs / f"{number:064x}"))
    if config.gguf_path is None:
        return replace(config, model_path=snapshot)
    return replace(config, gguf_path=snapshot / source.name)


def _logits(config: EngineConfig, *, from_disk: bool) -> list[torch.Tensor]:
    config = replace(config, cache_lens=64, cpu_infer=2, chunk_size=16, self_check=False)
    if from_disk:
        config = replace(config, experts_from="disk", experts_ram=1e-6)  # the fewest slots that work
    engine = static_engine(config)
    found = [one.clone() for one in logits_of(engine, _VOCABULARY)]
    assert (engine.expert_files is not None) == from_disk
    assert engine.expert_files is None or engine.expert_files.store.stats().misses > 0
    engine.close()
    return found


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_has_the_same_logits(kind: str, tmp_path: Path) -> None:
    """From the model's own files, where these can be read, and from a packed one beside them."""
    make, is_mapped = KINDS[kind]
    config = _linked(make(tmp_path), tmp_path)
    wanted = _logits(config, from_disk=False)
    if is_mapped:
        for one, want in zip(_logits(config, from_disk=True), wanted, strict=True):
            assert torch.equal(one, want)
    packed(config)
    for one, want in zip(_logits(config, from_disk=True), wanted, strict=True):
        assert torch.equal(one, want)
