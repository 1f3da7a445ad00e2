"""A model's files change between two runs: what was kept of the old ones is not used, wherever it was kept."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.api.llm import LLM
from ktransformers.errors import SessionFileError
from tests.support.engines.one_sequence import static_engine
from tests.support.gguf.writer import write_gguf
from tests.support.models.tiny_models import tiny_model, write_safetensors

PROMPT = list(range(5, 45))
PARAMS = SamplingParams(temperature=0, max_tokens=4)


def change_a_row(path: Path) -> None:
    """Of embeddings, with the size and the time of before: what a fine-tune or a repaired download looks like."""
    row = tiny_model("qwen3_moe", seed=6).get_input_embeddings().weight[PROMPT[3]].detach().float().numpy().tobytes()
    (file, at), *more = [
        (one, found) for one in (path if path.is_dir() else path.parent).iterdir()
        if (found := one.read_bytes().find(row)) >= 0
    ]  # fmt: skip
    assert not more
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(at)
        opened.write(bytes(len(row)))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def made(kind: str, folder: Path) -> Path:
    """A model's path: of safetensors in one file or shards, or a GGUF."""
    folder.mkdir()
    model = tiny_model("qwen3_moe", seed=6)
    if kind in ("gguf", "splits"):
        return write_gguf(model, folder / "model.gguf", shard_max_tensors=9 if kind == "splits" else 0)
    if kind == "shards":
        write_safetensors(model, folder, "100KB")
        assert len(list(folder.glob("*.safetensors"))) > 2
    else:
        write_safetensors(model, folder)
    return folder


def llm_of(path: Path, pages: Path | None = None) -> LLM:
    options = {} if pages is None else {"kv_disk_path": pages, "cpu_memory_size_GB": 0.001}
    where = {"model_path": path} if path.is_dir() else {"gguf_path": path}
    return LLM(**where, page_size=8, cache_lens=128, cpu_infer=1, self_check=False, **options)  # type: ignore[arg-type]


@pytest.mark.exhaustive
@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["file", "shards", "gguf", "splits"])
def test_pages_and_sessions_of_the_old_weights_are_not_used(kind: str, tmp_path: Path) -> None:
    path, pages, session = made(kind, tmp_path / "model"), tmp_path / "pages", tmp_path / "s.safetensors"
    with llm_of(path, pages) as llm:
        first = llm.generate([PROMPT], PARAMS)[0]
        assert first.stats.cached_len == 0
        llm.save_session(session, first)
    with llm_of(path, pages) as llm:  # the same files
        again = llm.generate([PROMPT], PARAMS)[0]
        assert again.stats.cached_len == 32
        assert again.token_ids == first.token_ids
        llm.load_session(session)
    for file in (tmp_path / "model").iterdir():
        os.utime(file)
    copy = shutil.copytree(tmp_path / "model", tmp_path / "copy")
    moved = Path(copy) / path.relative_to(tmp_path / "model")
    for same in (path, moved):
        with llm_of(same, pages) as llm:
            assert llm.generate([PROMPT], PARAMS)[0].stats.cached_len == 32
            llm.load_session(session)
    change_a_row(path)
    with llm_of(path, pages) as llm, llm_of(path) as plain:
        other = llm.generate([PROMPT], PARAMS)[0]
        assert other.stats.cached_len == 0
        assert other.token_ids == plain.generate([PROMPT], PARAMS)[0].token_ids
        for recompute in (False, True):
            with pytest.raises(SessionFileError, match="of the same shape with other weights"):
                llm.load_session(session, recompute=recompute)
    with llm_of(moved, pages) as llm:  # which nobody has changed
        assert llm.generate([PROMPT], PARAMS)[0].stats.cached_len == 32


def test_code_that_comes_with_a_model_is_part_of_it(tmp_path: Path) -> None:
    path = made("file", tmp_path / "model")
    (path / "modeling_tiny.py").write_text("A = 1\n")
    config = EngineConfig(model_path=path, cpu_infer=1, self_check=False, cache_lens=64)
    found = []
    for trusted, text in ((False, "A = 1\n"), (False, "A = 2\n"), (True, "A = 2\n"), (True, "A = 3\n")):
        (path / "modeling_tiny.py").write_text(text)
        engine = static_engine(EngineConfig(**{**vars_of(config), "trust_remote_code": trusted}))
        found.append(engine.identity.data)
        engine.close()
    assert found[0] == found[1]
    assert len(set(found)) == 3


def vars_of(config: EngineConfig) -> dict[str, object]:
    return {name: getattr(config, name) for name in ("model_path", "cpu_infer", "self_check", "cache_lens")}
