"""Opens and plans mutated models, in a process of its own with a limited address space and a limit of time for each.

usage: python -m tests.support.fuzz.models gguf|folder COUNT SEED [FIRST]

A mutated model is either planned and described, or refused with one of the project's own errors and a message of
bounded length. Prints one JSON line: counts, and every other outcome with its mutation's number.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ktransformers.config import EngineConfig
from ktransformers.engine.load.builder import plan_model
from ktransformers.engine.model.opened import describe_model, open_model
from ktransformers.errors import KTransformersError
from ktransformers.weights.gguf import file as gguf_parser
from tests.support.gguf.writer import write_gguf
from tests.support.models.demo import DEMO_CHECKPOINT
from tests.support.models.tiny_models import tiny_model, write_safetensors

LIMIT_BYTES = 512 << 20
LIMIT_SECONDS = 5.0  # of processor time
MAX_MESSAGE = 3000

INTERESTING = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 63, 65, 127, 128, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31]
INTERESTING += [(1 << 32) - 1, 1 << 40, (1 << 63) - 1, (1 << 64) - 1, -1]
GGUF_TYPES = ("qwen3_moe", "deepseek_v3", "llama", "gpt_oss", "glm4_moe", "mixtral", "qwen2_moe", "hunyuan_v1_moe")
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Reader = Callable[[Path], None]
Mutator = Callable[[Path, random.Random], Path]


class Hang(BaseException):
    """No Exception, so that nothing takes it for an error of its own."""


def plan(config: EngineConfig) -> None:
    opened = open_model(config)
    plan_model(config, opened)
    model = describe_model(opened)
    if model.tokenizer.has_vocabulary:
        ids = model.tokenizer.encode("The capital of France is 42.")
        model.tokenizer.decode(ids)
        if model.tokenizer.has_chat_template:
            messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
            model.tokenizer.apply_chat_template([*messages, messages[0]], enable_thinking=True)


# -- GGUF


class Header:
    """A GGUF file's header, taken apart. values: key to (type, value); an array's value is (element type, list)."""

    def __init__(self, path: Path):
        file = gguf_parser.parse_file(path)
        self.values = {key: _typed(value) for key, value in file.metadata.items()}
        start = min(tensor.offset for tensor in file.tensors.values())
        self.tensors = [[t.name, list(t.shape), int(t.qtype), t.offset - start] for t in file.tensors.values()]
        self.data = path.read_bytes()[start:]

    def to_bytes(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.values))]
        for key, (kind, value) in self.values.items():
            parts += [_string(key), struct.pack("<I", kind), _packed(kind, value)]
        for name, shape, qtype, offset in self.tensors:
            dims = [n % (1 << 64) for n in reversed(shape)]
            parts += [_string(name), struct.pack(f"<I{len(dims)}Q", len(dims), *dims)]
            parts.append(struct.pack("<IQ", qtype % (1 << 32), offset % (1 << 64)))
        header = b"".join(parts)
        return header + bytes(-len(header) % 32) + self.data


def _typed(value: Any) -> tuple[int, Any]:
    if isinstance(value, np.ndarray):
        kind = {"i": 5, "u": 4, "f": 6, "b": 7}[value.dtype.kind]
        return 9, (kind, value.tolist())
    if isinstance(value, list):
        return 9, (8, value)
    return {bool: 7, int: 10 if value != -1 else 11, float: 12, str: 8}[type(value)], value


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _packed(kind: int, value: Any) -> bytes:
    if kind == 8:
        return _string(str(value))
    if kind == 9:
        inner, items = value
        return struct.pack("<IQ", inner, len(items)) + b"".join(_packed(inner, item) for item in items)
    code = SCALARS[kind]
    if code in "fd":
        return struct.pack("<" + code, float(value))
    if code == "?":
        return bytes([bool(value)])
    size = struct.calcsize("<" + code)
    return (int(value) % (1 << (8 * size))).to_bytes(size, "little")


def mutate_gguf(source: Path, rng: random.Random) -> Path:
    header = Header(source)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.7:
            _mutate_value(header, rng)
        else:
            _mutate_tensor(header, rng)
    target = source.with_name("mutated.gguf")
    target.write_bytes(header.to_bytes())
    return target


def _mutate_value(header: Header, rng: random.Random) -> None:
    keys = [key for key in header.values if not key.startswith("tokenizer.")]
    key = rng.choice(keys if rng.random() < 0.7 else list(header.values))
    kind, value = header.values[key]
    choice = rng.randrange(10)
    if choice < 5 and kind not in (8, 9) and math.isfinite(value):
        number = rng.choice([*INTERESTING, rng.getrandbits(8), int(value) + 1, int(value) * 2, int(value) - 1])
        header.values[key] = (kind, number)
    elif choice == 5:
        header.values[key] = rng.choice(
            [(12, rng.choice([math.nan, math.inf, -1.0, 0.0, 1e300, 1e-320])), (8, "x"), (7, True), (8, "")]
        )
    elif choice == 6:
        del header.values[key]
    elif choice == 7:
        inner = rng.choice([(4, [2, 3]), (4, []), (8, ["a"]), (5, [rng.choice([-1, 7, 1 << 30])] * 2), (6, [math.nan])])
        header.values[key] = (9, inner)
    elif choice == 8:
        other = rng.choice(keys)
        header.values[key] = header.values.get(other, (8, "gone"))
    elif kind == 9 and value[1]:
        items = list(value[1])
        at = rng.randrange(len(items))
        items[at : at + rng.choice((1, 2, len(items)))] = rng.choice([[], [items[0]], [items[at]] * 3])
        header.values[key] = (9, (value[0], items))
    else:
        architectures = ["llama", "deepseek2", "gpt-oss", "qwen3moe", "phimoe", "minimax-m2", "granitemoe", "clip", "x"]
        name = rng.choice(architectures)
        old = header.values.get("general.architecture", (8, "x"))[1]
        header.values = {k.replace(f"{old}.", f"{name}.", 1): v for k, v in header.values.items()}
        header.values["general.architecture"] = (8, name)


def _mutate_tensor(header: Header, rng: random.Random) -> None:
    if not header.tensors:
        return
    tensor = rng.choice(header.tensors)
    choice = rng.randrange(8)
    if choice < 3:  # another shape of the same bytes, so that the file itself stays sound
        total = math.prod(tensor[1])
        split = rng.choice([n for n in (1, 2, 4, 8, 16, 32, max(total, 1)) if total % n == 0])
        tensor[1] = rng.choice([[total // split, split], [split, total // split], [total], list(reversed(tensor[1]))])
        tensor[1] = rng.choice([tensor[1], [*tensor[1][:-1], 1, tensor[1][-1]][:4]])
    elif choice == 3:
        tensor[1][rng.randrange(len(tensor[1]))] = rng.choice(INTERESTING)
    elif choice == 4:
        tensor[2] = rng.randrange(45)
    elif choice == 5:
        tensor[3] = rng.choice([0, 32, 1 << 40, (1 << 64) - 32, rng.choice(header.tensors)[3]])
    elif choice == 6:
        tensor[0] = rng.choice(
            ["", "x", "blk.99999999.attn_q.weight", "rope_freqs.weight", tensor[0].replace("0", "1")]
        )
    else:
        header.tensors.remove(tensor)


def gguf_models(folder: Path) -> list[Path]:
    return [write_gguf(tiny_model(kind), folder / f"{kind}.gguf") for kind in GGUF_TYPES]


# -- folders


JUNK = [
    None,
    True,
    False,
    0,
    -1,
    0.5,
    1e308,
    2**31,
    2**63,
    10**30,
    "",
    "x",
    "relu",
    [],
    [1],
    {},
    {"a": [1]},
    [[[]]],
    [None],
]
JUNK += [
    [0] * 4,
    ["full_attention"],
    "yarn",
    {"rope_type": "yarn"},
    {"rope_type": "longrope", "factor": 0},
    3,
    7,
    1 << 20,
]
TEMPLATES = [
    "{% if a %}" * 2000 + "{% endif %}" * 2000,
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{{ 'x' * 10 ** 11 }}",
    "{{ messages[9].content.x.y }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}",
    "{% for %}",
    "{{ '%1000000000d' % 3 }}",
    "{{ raise_exception('no') }}",
    "{{ (" * 500,
]
RULES = [
    "- {match: {name: '^(a|a|aa)+$'}, replace: {}}",
    "- {match: {name: '(.*)*(.*)*(.*)*x$'}, replace: {}}",
    "- {match: {name: '^(([a-z_.0-9])+.)+[A-Z]([a-z])+$'}, replace: {}}",
    "- {match: {class: antigravity.X}, replace: {}}",
    "- {match: {class: torch.nn.Module}, replace: {class: this.Operator}}",
    "- {match: {class: torch.nn.Module}, replace: {class: ktransformers.operators.linear.KTransformersLinear}}",
    "- {match: {name: ''}, replace: {}}",
    "a: &a [x,x,x]\nb: &b [*a,*a,*a]\nc: &c [*b,*b,*b]\n- *c",
    "[" * 3000,
    "- include: rules.yaml",
    "- include: default-moe.yaml\n" * 200,
    "- include: /dev/zero",
    "- include: ../../../../../etc/passwd",
    "- &a {match: *a}",
    "- {match: {name: '(?:a{0,65535}){0,65535}'}, replace: {}}",
    "- {match: {name: '" + "(" * 300 + ")" * 300 + "'}, replace: {}}",
    "- {match: {class: transformers.models.auto.X}, replace: {}}",
    "- {match: {class: ktransformers.models.modeling_../x.Y}, replace: {}}",
    "- {match: {name: '.*'}, replace: {class: ktransformers.operators.experts.KTransformersExperts}}",
    "- {match: {name: n}, replace: {class: ktransformers.operators.norm.KRMSNorm, kwargs: {out_device: 'cuda:7'}}}",
]


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document, at most some thousands."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting and len(found) < 5000:
        one = waiting.pop()
        keys = one.keys() if isinstance(one, dict) else range(min(len(one), 40))
        for key in keys:
            found.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    return found


def _mutate_json(value: Any, rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 2, 4))):
        places = _places(value)
        if not places:
            break
        container, key = rng.choice(places)
        choice = rng.randrange(10)
        if choice < 6:
            container[key] = copy.deepcopy(rng.choice(JUNK))
        elif choice == 6 and isinstance(container, dict):
            del container[key]
        elif choice == 7:
            container[key] = [container[key]]
        elif choice == 8 and isinstance(container[key], int):
            container[key] = rng.choice([container[key] + 1, container[key] * 2, -container[key], container[key] ** 9])
        elif isinstance(container, dict):
            container[rng.choice(["rope_scaling", "quantization_config", "num_labels", "dtype", "auto_map", "x"])] = (
                copy.deepcopy(rng.choice(JUNK))
            )
    text = json.dumps(value)
    if rng.random() < 0.05:
        text = rng.choice(["[" * 90_000, "", "{}", "[]", "null", "3", text[:-9], '{"a":' * 9000, "9" * 9000, "\0"])
    return text


FOLDER_TYPES = ("qwen3_moe", "deepseek_v3", "llama", "gpt_oss", "glm4_moe", "mixtral", "phimoe")


def folder_models(folder: Path) -> list[Path]:
    paths = []
    for kind in FOLDER_TYPES:
        path = write_safetensors(tiny_model(kind), folder / kind)
        path = path if path.is_dir() else path.parent
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
            if (DEMO_CHECKPOINT / name).is_file():
                shutil.copy(DEMO_CHECKPOINT / name, path / name)
        paths.append(path)
    return paths


def mutate_folder(source: Path, rng: random.Random) -> Path:
    target = source.with_name("mutated")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    files = sorted(path.name for path in target.glob("*.json"))
    choice = rng.randrange(12)
    if choice < 5:
        name = "config.json"
    elif choice < 9:
        name = rng.choice(files)
    elif choice == 9:
        (target / "chat_template.jinja").write_text(rng.choice(TEMPLATES))
        return target
    elif choice == 10:
        (target / "rules.yaml").write_text(rng.choice(RULES))
        return target
    else:
        _mutate_weights(target, rng)
        return target
    path = target / name
    path.write_text(_mutate_json(json.loads(path.read_text()), rng))
    return target


def _mutate_weights(target: Path, rng: random.Random) -> None:
    (path,) = target.glob("*.safetensors")
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    if rng.random() < 0.5:
        name = rng.choice([name for name in header if name != "__metadata__"])
        shape = header[name]["shape"]
        header[name]["shape"] = rng.choice([list(reversed(shape)), [math.prod(shape)], [1, *shape], [*shape, 1]])
        text = json.dumps(header)
    else:
        text = _mutate_json(header, rng)
    index = {"metadata": {}, "weight_map": dict.fromkeys((n for n in header if n != "__metadata__"), path.name)}
    if rng.random() < 0.3:
        (target / "model.safetensors.index.json").write_text(_mutate_json(index, rng))
        return
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + length :])


def read_folder(path: Path) -> None:
    rules = path / "rules.yaml"
    plan(EngineConfig(model_path=path, optimize_config_path=rules if rules.exists() else None, use_cuda=False))


def read_gguf(path: Path) -> None:
    plan(EngineConfig(gguf_path=path, use_cuda=False))


# -- running


def run(kind: str, count: int, seed: int, first: int) -> dict[str, Any]:
    models, mutate, read = {
        "gguf": (gguf_models, mutate_gguf, read_gguf),
        "folder": (folder_models, mutate_folder, read_folder),
    }[kind]
    folder = Path(tempfile.mkdtemp())
    sources = models(folder)
    for source in sources:
        read(source)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + LIMIT_BYTES, used + LIMIT_BYTES))
    signal.signal(signal.SIGPROF, _hang)
    counts: dict[str, Any] = {"planned": 0, "refused": 0, "files": count, "failed": []}
    for index in range(first, count):
        rng = random.Random(seed * 1_000_003 + index)
        mutated = mutate(rng.choice(sources), rng)
        outcome = _outcome(read, mutated)
        if outcome in ("planned", "refused"):
            counts[outcome] += 1
        else:
            counts["failed"].append([index, outcome])
            print(index, outcome, file=sys.stderr, flush=True)
    shutil.rmtree(folder)
    return counts


def _hang(*_: object) -> None:
    raise Hang


def _outcome(read: Reader, path: Path) -> str:
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        read(path)
    except KTransformersError as error:
        return "refused" if len(str(error)) < MAX_MESSAGE else f"message of {len(str(error))}: {str(error)[:200]}"
    except BaseException as error:  # noqa: BLE001 - everything else is what is looked for
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "/ktransformers/" in f.filename][-3:]
        last = f"{frames[-1].filename[-40:]}:{frames[-1].lineno}"
        return f"{type(error).__name__}: {str(error)[:150]!r} at {' '.join(own)} ... {last}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return "planned"


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    print(json.dumps(run(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]) if sys.argv[4:] else 0)))
