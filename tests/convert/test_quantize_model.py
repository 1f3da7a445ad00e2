"""quantize: what is copied, what is kept of a stopped run, what it refuses; the program as a user calls it."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import weakref
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGUFValueType

from ktransformers.cli import main
from ktransformers.convert import partial_file, writing
from ktransformers.convert.mixtures import TypeRule
from ktransformers.errors import CapacityError, ConfigError, WeightError
from ktransformers.kernels.types import QuantType as T
from tests.support.gguf.converting import contents, quantized, tensors
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.models.mtp_models import tiny_mtp, write_mtp
from tests.support.models.tiny_models import write_safetensors

ROWS, COLS = 24, 512


def small_gguf(path: Path, *, layers: int = 3, shards: int = 0, alignment: int = 0) -> Path:
    """No model that runs: a few matrices under a model's names, and metadata of every type."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=shards)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(layers)
    writer.add_head_count(4)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_token_list(["a", "b\u0142", ""])
    writer.add_key_value("some.u64", 1 << 40, GGUFValueType.UINT64)
    writer.add_key_value("some.i16", -3, GGUFValueType.INT16)
    writer.add_key_value("some.f64", 0.1, GGUFValueType.FLOAT64)
    writer.add_key_value("some.flags", [True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL)
    writer.add_key_value("some.i8", [1, -1], GGUFValueType.ARRAY, GGUFValueType.INT8)
    rng = np.random.default_rng(0)
    for layer in range(layers):
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", rng.standard_normal(COLS, dtype=np.float32))
        for part in ("attn_q", "ffn_down"):
            values = rng.standard_normal((ROWS, COLS), dtype=np.float32).astype(np.float16)
            writer.add_tensor(f"blk.{layer}.{part}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))[0] if shards else path


def test_metadata_and_alignment_are_copied(tmp_path: Path) -> None:
    given, out = small_gguf(tmp_path / "in.gguf", alignment=128), tmp_path / "out.gguf"
    quantized(given, out, "q8_0")
    wanted, got = contents(given), contents(out)
    wanted["general.file_type"] = (["UINT32"], int(gguf.LlamaFileType.MOSTLY_Q8_0))
    assert got == wanted | {"general.quantization_version": (["UINT32"], gguf.GGML_QUANT_VERSION)}
    reader = gguf.GGUFReader(out)
    assert reader.alignment == 128
    assert all(tensor.data_offset % 128 == 0 for tensor in reader.tensors)
    found, before = tensors(out), tensors(given)
    assert list(found) == list(before)
    for name, (qtype, shape, data) in found.items():
        assert shape == before[name][1]
        assert qtype is (T.F32 if "norm" in name else T.Q8_0)
        values = before[name][2].view(np.float32 if "norm" in name else np.float16).astype(np.float32).reshape(shape)
        assert (data == gguf.quants.quantize(values, qtype).view(np.uint8).reshape(-1)).all()


def test_of_a_file_of_ollama_the_language_model_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without its parts for images, and without tokens that the embedding table has no rows for."""
    caplog.set_level(logging.INFO, "ktransformers")
    given, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    writer = gguf.GGUFWriter(given, "gemma3")
    writer.add_block_count(1)
    writer.add_uint32("gemma3.vision.block_count", 1)
    writer.add_token_list(["a", "b", "c", "<image>"])
    writer.add_token_types([1, 1, 1, 3])
    writer.add_token_scores([0.0, -1.0, -2.0, -3.0])
    kept = {"token_embd.weight": (3, COLS), "blk.0.attn_q.weight": (ROWS, COLS), "blk.0.attn_norm.weight": (COLS,)}
    for name, shape in {**kept, "v.blk.0.attn_q.weight": (4, 4), "mm.mm_input_projection.weight": (4, 4)}.items():
        writer.add_tensor(name, np.ones(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantized(given, out, "q8_0")
    assert {name: shape for name, (_, shape, _) in tensors(out).items()} == kept
    assert "2 tensors for images and sound are left out" in caplog.text
    found = contents(out)
    assert not any("vision" in key for key in found)
    assert found["tokenizer.ggml.tokens"] == (["ARRAY", "STRING"], ["a", "b", "c"])
    assert found["tokenizer.ggml.token_type"] == (["ARRAY", "INT32"], [1, 1, 1])
    assert found["tokenizer.ggml.scores"] == (["ARRAY", "FLOAT32"], [0.0, -1.0, -2.0])


def test_shards_become_one_file(tmp_path: Path) -> None:
    one, out = tmp_path / "one.gguf", tmp_path / "out.gguf"
    quantized(small_gguf(tmp_path / "whole.gguf"), one, "q4_0")
    (tmp_path / "shards").mkdir()
    quantized(small_gguf(tmp_path / "shards" / "in.gguf", shards=4), out, "q4_0")
    assert one.read_bytes() == out.read_bytes()


def test_blocks_of_the_same_type_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The demo model's Q6_K is copied where it is asked for, and Q4_K quantized again, with a word."""
    out = tmp_path / "out.gguf"
    quantized(DEMO_GGUF, out, "q6_k")
    before, got = tensors(DEMO_GGUF), tensors(out)
    same = [name for name, (qtype, _, _) in before.items() if qtype is T.Q6_K]
    assert same
    assert all((got[name][2] == before[name][2]).all() for name in same)
    assert "are quantized already and lose more" in caplog.text


def stop_after(pieces: int) -> Any:
    left = [pieces]

    def each(nbytes: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    return each


@pytest.mark.parametrize("pieces", [1, 4, 8])
def test_a_stopped_run_goes_on(pieces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bytes, without quantizing again what is there."""
    given, wanted, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "wanted.gguf", tmp_path / "out.gguf"
    quantized(given, wanted, "q4_k_m")
    with pytest.raises(KeyboardInterrupt):
        quantized(given, out, "q4_k_m", stop_after(pieces), num_threads=1)
    assert not out.exists()
    done = (tmp_path / "out.gguf.partial.done").read_text().splitlines()[1:]
    again: list[str] = []
    original = writing.rows_as
    monkeypatch.setattr(writing, "rows_as", lambda *args: again.append("") or original(*args))
    quantized(given, out, "q4_k_m")
    assert out.read_bytes() == wanted.read_bytes()
    assert len(again) == 9 - len(done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.gguf", "out.gguf", "wanted.gguf"]


def test_what_was_not_noted_is_written_again(tmp_path: Path) -> None:
    """As after a kill: half a line at the end, and bytes of a tensor that are not there."""
    given, wanted, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "wanted.gguf", tmp_path / "out.gguf"
    quantized(given, wanted, "q4_0")
    with pytest.raises(KeyboardInterrupt):
        quantized(given, out, "q4_0", stop_after(5), num_threads=1)
    record, partial = tmp_path / "out.gguf.partial.done", tmp_path / "out.gguf.partial"
    first, *lines = record.read_text().splitlines()
    name = json.loads(lines[-1])
    record.write_text("\n".join([first, *lines])[:-3])
    with partial.open("r+b") as file:
        tensor = next(one for one in gguf.GGUFReader(wanted).tensors if one.name == name)
        file.seek(int(tensor.data_offset))
        file.write(b"\xff" * int(tensor.n_bytes))
    quantized(given, out, "q4_0")
    assert out.read_bytes() == wanted.read_bytes()


def test_what_is_left_of_another_run_is_not_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given, wanted, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "wanted.gguf", tmp_path / "out.gguf"
    quantized(given, wanted, "q4_0")
    with pytest.raises(KeyboardInterrupt):
        quantized(given, out, "q4_0", stop_after(5), num_threads=1)
    os.utime(given, ns=(1, 1))  # the input was written anew
    quantized(given, out, "q4_0")
    assert "is what is left of another run" in caplog.text
    assert out.read_bytes() == wanted.read_bytes()


@pytest.mark.every(3)
@pytest.mark.parametrize("mixture", ["q3_k_m", "iq3_xxs", "iq2_xs", "iq1_m"])
def test_threads_and_pieces_do_not_show(mixture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, one, other = small_gguf(tmp_path / "in.gguf"), tmp_path / "one.gguf", tmp_path / "other.gguf"
    quantized(given, one, mixture, num_threads=1, without_imatrix=True)
    monkeypatch.setattr(writing, "_PIECE_WEIGHTS", 1)
    monkeypatch.setattr(writing, "_BLOCK_ROWS", 5)
    quantized(given, other, mixture, num_threads=5, without_imatrix=True)
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.every(3)
@pytest.mark.parametrize("mixture", ["iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s"])
def test_types_that_need_an_imatrix_say_so(mixture: str, tmp_path: Path) -> None:
    given, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    with pytest.raises(ConfigError, match=r"3 tensors \(blk.0.attn_q.weight, ...\) .*--imatrix.*--without_imatrix"):
        quantized(given, out, mixture, rules=[TypeRule(re.compile("ffn_down"), T.Q4_K, 1)])
    assert list(tmp_path.iterdir()) == [given]
    quantized(given, out, mixture, without_imatrix=True)
    types = {"iq1_s": T.IQ1_S, "iq1_m": T.IQ1_M, "iq2_xxs": T.IQ2_XXS}
    assert tensors(out)["blk.1.attn_q.weight"][0] is types.get(mixture, T.IQ2_XS)
    quantized(given, out, "iq2_m", force=True)  # as do those of more bits
    assert tensors(out)["blk.1.attn_q.weight"][0] is T.IQ2_S


def test_only_pieces_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 at most one piece a thread, and as many finished ones that wait for nothing."""
    alive, peak = [0], [0]
    original = writing.rows_f32

    def counted(*args: Any) -> np.ndarray:
        values = original(*args)
        alive[0] += values.nbytes
        peak[0] = max(peak[0], alive[0])
        weakref.finalize(values, lambda nbytes: alive.__setitem__(0, alive[0] - nbytes), values.nbytes)
        return values

    monkeypatch.setattr(writing, "rows_f32", counted)
    monkeypatch.setattr(writing, "_PIECE_WEIGHTS", 1)
    monkeypatch.setattr(writing, "_BLOCK_ROWS", 4)
    quantized(small_gguf(tmp_path / "in.gguf", layers=8), tmp_path / "out.gguf", "q4_0", num_threads=2)
    assert 0 < peak[0] <= 2 * 4 * COLS * 4


def test_a_full_disk_is_said_before_and_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "out.gguf"

    def full(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(partial_file.os, "posix_fallocate", full)
        with pytest.raises(CapacityError, match=r"has no room for out.gguf \(.* are free"):
            quantized(given, out, "q8_0")
    calls = [0]
    original = os.pwrite

    def later(fd: int, data: Any, offset: int) -> int:
        calls[0] += 1
        return full() if calls[0] > 4 else original(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(partial_file.os, "pwrite", later)
        with pytest.raises(CapacityError, match="has no room"):
            quantized(given, out, "q8_0", num_threads=1)
    assert (tmp_path / "out.gguf.partial").exists()
    quantized(given, out, "q8_0")
    assert out.exists()


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    given, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    out.write_bytes(b"mine")
    with pytest.raises(ConfigError, match="exists; --force overwrites it"):
        quantized(given, out)
    assert out.read_bytes() == b"mine"
    quantized(given, out, force=True)
    assert out.read_bytes()[:4] == b"GGUF"
    with pytest.raises(ConfigError, match="is what is to be quantized"):
        quantized(given, given, force=True)
    with pytest.raises(ConfigError, match=r"must be named \*.gguf"):
        quantized(given, tmp_path / "out.bin")
    with pytest.raises(ConfigError, match="is no folder"):
        quantized(given, tmp_path / "none" / "out.gguf")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "in.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("blk.0.attn_q.weight", np.full((2, 256), np.nan, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(WeightError, match=r"blk.0.attn_q.weight: cannot quantize to Q4_K: a weight is not finite"):
        quantized(tmp_path / "in.gguf", tmp_path / "out.gguf", "q4_k_s")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given, out = small_gguf(tmp_path / "in.gguf"), tmp_path / "out.gguf"
    rules = tmp_path / "rules.yaml"
    rules.write_text("- {match: attn_q, type: q8_0}\n")
    assert main(["quantize", str(given), str(out), "--type", "Q4_K_S", "--rules", str(rules)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "100 %" in said.err
    assert "bits per weight" in said.err
    assert tensors(out)["blk.0.attn_q.weight"][0] is T.Q8_0
    assert main(["quantize", str(given), str(out), "--type", "q4_0"]) == 2
    assert "--force overwrites it" in capsys.readouterr().err
    monkeypatch.setattr(writing, "quantize", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    assert main(["quantize", str(given), str(out), "--type", "q4_0", "--force"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_a_task_from_safetensors_says_how_many_bits(tmp_path: Path) -> None:
    done = quantized(DEMO_CHECKPOINT, tmp_path / "demo.gguf", "q4_k_m")
    sizes = {name: data.nbytes for name, (_, _, data) in tensors(tmp_path / "demo.gguf").items()}
    assert sum(done.types.values()) == sum(sizes.values())
    assert done.nbytes == (tmp_path / "demo.gguf").stat().st_size
    assert 4.5 < done.bits_per_weight < 5.5


def test_a_layer_that_drafts_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once; the file is the same as of the model without it."""
    tiny = tiny_mtp("qwen3_moe")
    caplog.set_level(logging.INFO)
    quantized(write_mtp(tiny, tmp_path / "with"), tmp_path / "with.gguf")
    assert len(re.findall(r"\d+ tensors of the layer for multi-token prediction are left out", caplog.text)) == 1
    caplog.clear()
    quantized(write_safetensors(tiny.main, tmp_path / "without"), tmp_path / "without.gguf")
    assert "multi-token prediction" not in caplog.text
    wanted, got = (tensors(tmp_path / f"{name}.gguf") for name in ("without", "with"))
    assert got.keys() == wanted.keys()
    assert all((got[name][2] == data).all() for name, (_, _, data) in wanted.items())
