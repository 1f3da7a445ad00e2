"""Feeds mutated GGUF and safetensors headers to the parsers, in a process of its own with a limited address space.

usage: python -m tests.support.fuzz.headers gguf|safetensors COUNT SEED

A mutated file must either parse, and then every byte of every tensor can be read and decoded, or raise one of the
project's own errors. Anything else ends the process with a traceback that names the mutation's number. The address
space is limited to what the process has before the first mutation plus LIMIT_BYTES, so that an allocation sized by a
hostile number fails. Prints one JSON line with counts.
"""

from __future__ import annotations

import json
import random
import resource
import struct
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import safetensors.torch
import torch

from ktransformers.errors import ConfigError, WeightError
from ktransformers.kernels.types import QuantType
from ktransformers.models.gguf.config import config_from_gguf
from ktransformers.weights.gguf import file as gguf_parser
from ktransformers.weights.quantize.transcode import dequantize, transcode
from ktransformers.weights.safetensors import file as safetensors_parser

LIMIT_BYTES = 64 << 20
TRACED_EVERY = 20
# Python objects cost more than the bytes that they are made from (an empty string of 8 bytes in the file takes 49 + 8).
# The constant is for what transformers allocates while it makes a config.
TRACED_FACTOR, TRACED_CONSTANT = 40, 500_000

INTERESTING = [0, 1, 2, 3, 7, 8, 9, 12, 31, 32, 127, 128, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31]
INTERESTING += [(1 << 32) - 1, 1 << 32, 1 << 40, (1 << 61) + 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 32, (1 << 64) - 1]


def small_gguf(path: Path) -> None:
    """Every metadata type, and tensors of a native, a repacked, a table and a float type."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_feed_forward_length(64)
    for kind in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float32", "float64"):
        getattr(writer, f"add_{kind}")(f"x.{kind}", 1)
    writer.add_bool("x.bool", True)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "", "déf"])
    writer.add_array("x.ints", [1, 2, 3])
    writer.add_array("x.floats", [0.5, 1.5])
    writer.add_array("x.bools", [True, False])
    writer.add_custom_alignment(32)
    for name, qtype, rows, cols in (
        ("token_embd.weight", QuantType.F32, 4, 32),
        ("blk.0.attn_q.weight", QuantType.Q8_0, 2, 64),
        ("blk.0.attn_k.weight", QuantType.Q3_K, 1, 256),
        ("blk.0.ffn_up.weight", QuantType.IQ2_XXS, 1, 256),
        ("blk.0.ffn_gate_exps.weight", QuantType.MXFP4, 2, 32),
    ):
        block, size = gguf.GGML_QUANT_SIZES[qtype]
        if qtype is QuantType.F32:
            writer.add_tensor(name, rng.standard_normal((rows, cols)).astype(np.float32))
        else:
            writer.add_tensor(name, rng.integers(0, 256, (rows, cols // block * size), dtype=np.uint8), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf(path: Path) -> None:
    model = gguf_parser.open_gguf(path)
    for name in model.tensors:
        raw = model.raw(name)
        raw.data.sum()
        if raw.qtype in gguf.quants._type_traits or raw.qtype.name in ("F32", "F16"):
            dequantize(raw, name)
            transcode(raw, name)
    try:
        config_from_gguf(model.metadata, {name: tensor.shape for name, tensor in model.tensors.items()})
    except (WeightError, ConfigError) as error:  # the file itself is sound
        check_message(error)


def small_safetensors(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(4, 8, generator=generator)
    tensors = {"a.weight": values, "b.weight": values.bfloat16(), "c.weight": values.to(torch.float8_e4m3fn)}
    tensors |= {"c.weight_scale_inv": torch.ones(1, 1), "d": torch.arange(3), "e": torch.empty(0, 4)}
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


def read_safetensors(path: Path) -> None:
    model = safetensors_parser.open_safetensors(path)
    for name, tensor in model.tensors.items():
        model.bytes_of(name).sum()
        if tensor.dtype in safetensors_parser._DTYPES:
            model.torch_tensor(name).float().sum()


def check_message(error: Exception) -> None:
    """Nothing from a hostile file may reach the terminal unescaped or without bound."""
    assert str(error).isprintable(), ascii(str(error))
    assert len(str(error)) < 1500


def gguf_fields(path: Path) -> list[tuple[int, int]]:
    """(offset, bytes) of everything that the parser reads from a good file."""
    fields: list[tuple[int, int]] = []
    take = gguf_parser._Reader.take

    def recording(self: gguf_parser._Reader, nbytes: int, what: str) -> memoryview:
        fields.append((self.at, nbytes))
        return take(self, nbytes, what)

    gguf_parser._Reader.take = recording
    try:
        gguf_parser.parse_file(path)
    finally:
        gguf_parser._Reader.take = take
    return fields


def mutate_bytes(data: bytearray, rng: random.Random, fields: list[tuple[int, int]]) -> bytearray:
    kind = rng.randrange(8)
    header_end = fields[-1][0] + fields[-1][1]
    if kind == 0:
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(header_end)] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        at = rng.randrange(header_end)
        data[at:at] = rng.randbytes(rng.choice((1, 4, 8, 32)))
    elif kind == 3:
        at = rng.randrange(header_end)
        del data[at : at + rng.choice((1, 4, 8, 32))]
    elif kind == 4:  # one part of the header over another
        a, b, n = rng.randrange(header_end), rng.randrange(header_end), rng.choice((4, 8, 24, 64))
        data[a : a + n] = data[b : b + n]
    else:  # most hostile: a count, length, type, dimension or offset with a telling value
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            at, size = rng.choice([field for field in fields if field[1] in (1, 2, 4, 8)])
            value = rng.choice([*INTERESTING, len(data), len(data) - at, rng.getrandbits(16)])
            data[at : at + size] = (value % (1 << (8 * size))).to_bytes(size, "little")
    return data


def mutate_safetensors(data: bytearray, rng: random.Random, fields: list[tuple[int, int]]) -> bytearray:
    length = struct.unpack("<Q", data[:8])[0]
    if rng.random() < 0.5:
        return mutate_bytes(data, rng, [(0, 8), (8, length)])
    header = json.loads(bytes(data[8 : 8 + length]))
    names = [name for name in header if name != "__metadata__"]
    entry = header[rng.choice(names)]
    number = rng.choice([*INTERESTING, -1, 0.5, True, None, "3", 10**30, [1], {}])
    kind = rng.randrange(8)
    if kind == 0:
        entry["shape"] = [number] * rng.choice((0, 1, 2, 3, 9))
    elif kind == 1:
        entry["data_offsets"][rng.randrange(2)] = number
    elif kind == 2:
        entry["dtype"] = rng.choice(["F64", "I8", "F4", "F32", "F8_E4M3", "f32", 3, None])
    elif kind == 3:
        entry[rng.choice(["shape", "dtype", "data_offsets", "extra"])] = number
    elif kind == 4:
        header["x" * rng.choice((0, 1, 2000))] = rng.choice([entry, number, {}])
    elif kind == 5:
        entry["shape"] = entry["shape"] + [0] if rng.random() < 0.5 else entry["shape"][1:]
    elif kind == 6:
        del header[rng.choice(names)]
    text = json.dumps(header).encode()
    if kind == 7:
        text = rng.choice([b"[" * 50_000, b"{}", b"[]", b"", b'{"a":' * 20_000, text + b"x", b"9" * 9000, text[:-1]])
    return bytearray(struct.pack("<Q", len(text)) + text) + data[8 + length :]


def run(kind: str, count: int, seed: int) -> dict[str, int]:
    write, read, mutate = {
        "gguf": (small_gguf, read_gguf, mutate_bytes),
        "safetensors": (small_safetensors, read_safetensors, mutate_safetensors),
    }[kind]
    folder = Path(tempfile.mkdtemp())
    path = folder / ("m.gguf" if kind == "gguf" else "model.safetensors")
    write(path)
    read(path)
    good = path.read_bytes()
    fields = gguf_fields(path) if kind == "gguf" else []
    _limit_memory()
    counts = {"parsed": 0, "refused": 0, "files": count, "largest_trace": 0}
    for index in range(count):
        data = mutate(bytearray(good), random.Random(seed * 1_000_003 + index), fields)
        path.write_bytes(data)
        is_traced = index % TRACED_EVERY == 0
        try:
            counts["parsed" if _survives(read, path, is_traced, counts) else "refused"] += 1
        except BaseException:
            print(f"mutation {index} of seed {seed}", file=sys.stderr)
            raise
    path.unlink()
    folder.rmdir()
    return counts


def _survives(read: Callable[[Path], None], path: Path, is_traced: bool, counts: dict[str, int]) -> bool:
    if is_traced:
        tracemalloc.start()
    try:
        read(path)
    except (WeightError, ConfigError) as error:
        check_message(error)
        return False
    finally:
        if is_traced:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak <= TRACED_FACTOR * path.stat().st_size + TRACED_CONSTANT, peak
            counts["largest_trace"] = max(counts["largest_trace"], peak)
    return True


def _limit_memory() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
