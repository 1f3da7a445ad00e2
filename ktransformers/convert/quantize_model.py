"""The whole of `ktransformers quantize`: opens what it is given, decides types, writes the file.

safetensors ── open_model ── hf_tensors, gguf.of_config, vocab ─┐
                                                                ├─ choose_types ── lay_out ── write_tensors ──> OUT
GGUF ── open_gguf ── gguf_tensors, entries_of ──────────────────┘
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

import gguf
import numpy as np
import torch

from ktransformers import __version__
from ktransformers.config import EngineConfig
from ktransformers.convert.header import Entries, GGUFLayout, Placed, entries_of, entry, lay_out
from ktransformers.convert.hf_tensors import hf_tensors
from ktransformers.convert.imatrix import Imatrix
from ktransformers.convert.mixtures import (
    MIXTURES,
    ModelShape,
    TypeRule,
    choose_types,
    is_quantized,
    need_importance,
)
from ktransformers.convert.openable import check_opens
from ktransformers.convert.partial_file import PartialFile
from ktransformers.convert.progress import Advances
from ktransformers.convert.tensors import OutTensor, gguf_tensors
from ktransformers.convert.vocab import vocab_metadata
from ktransformers.convert.writing import Importance, write_tensors
from ktransformers.engine.model.mtp_names import MtpNames
from ktransformers.engine.model.opened import open_model
from ktransformers.errors import ConfigError, FormatError, UnsupportedError
from ktransformers.kernels.types import QuantType
from ktransformers.models.gguf.keys import is_key_of_other_parts
from ktransformers.models.gguf.of_config import check_comes_back, factor_tensors, hf_metadata
from ktransformers.system.cores import usable_cores
from ktransformers.tokenizer import load_tokenizer
from ktransformers.tokenizer.gguf_vocab import cut_vocab
from ktransformers.weights.gguf.file import GGUFModel, open_gguf
from ktransformers.weights.gguf.names import is_of_other_parts
from ktransformers.weights.loader import weight_format

__all__ = ["QuantizeResult", "Task", "quantize_model"]

logger = logging.getLogger(__name__)

_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3")


MakeProgress = Callable[[int, int], AbstractContextManager[Advances]]
"""Of (bytes of all tensors, bytes that are there already)."""


@dataclass(frozen=True, slots=True)
class Task:
    """Arguments of `ktransformers quantize`. model: a folder of safetensors, or a GGUF file or folder; mixture: a name
    of MIXTURES.

    num_threads 0: one for each core. force: whether `out` may be there already. without_imatrix: whether types that
    need one may do without.
    """

    model: Path
    out: Path
    mixture: str
    rules: Sequence[TypeRule] = ()
    imatrix: Imatrix | None = None
    num_threads: int = 0
    force: bool = False
    without_imatrix: bool = False


@dataclass(frozen=True, slots=True)
class QuantizeResult:
    """Result of quantizing a model. types: bytes by type's name; num_weights: of all tensors."""

    nbytes: int
    num_weights: int
    types: Counter[str]
    seconds: float

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight of the tensors alone."""
        return 8 * sum(self.types.values()) / max(self.num_weights, 1)


@dataclass(frozen=True, slots=True)
class _Input:
    """An opened model. files: with its weights."""

    arch: str
    entries: Entries
    tensors: list[OutTensor]
    shape: ModelShape
    files: tuple[Path, ...]
    check: Callable[[], None] = field(default=lambda: None)


def quantize_model(task: Task, progress: MakeProgress) -> QuantizeResult:
    """Quantize a model and write it to `task.out`. Raises ConfigError, WeightError, RuleError, or CapacityError when
    the disk is full.
    """
    start = time.monotonic()
    _check_out(task)
    given = _open(task)
    mixture = MIXTURES[task.mixture]
    layout = _layout(task, given)
    given.check()
    importance = _importance(task, given)
    _warn_of_quantized(given, layout)
    sizes = {one.name: one.nbytes for one in layout.tensors}
    with PartialFile(task.out, layout, _identity(task, given)) as file:
        here = sum(sizes[name] for name in file.done)
        if here:
            logger.info("%d of %d tensors are there; going on", len(file.done), len(sizes))
        with progress(sum(sizes.values()), here) as shown:
            threads = task.num_threads or usable_cores()
            write_tensors(file, given.tensors, importance, threads, shown.advance)
        file.finish()
    logger.info("%s: %s as %s", task.out, given.arch, mixture.file_type.name)
    types: Counter[str] = Counter()
    for one in layout.tensors:
        types[one.qtype.name] += one.nbytes
    num_weights = sum(int(np.prod(one.shape, dtype=np.int64)) for one in layout.tensors)
    return QuantizeResult(layout.nbytes, num_weights, types, time.monotonic() - start)


def _check_out(task: Task) -> None:
    if task.out.suffix != ".gguf":
        raise ConfigError(f"OUT must be named *.gguf, got {task.out}")
    if task.out.exists() and not task.force:
        raise ConfigError(f"{task.out} exists; --force overwrites it")
    if not task.out.parent.is_dir():
        raise ConfigError(f"{task.out.parent} is no folder; make it first")


def _open(task: Task) -> _Input:
    kind = weight_format(task.model, "safetensors" if (task.model / "config.json").is_file() else None)
    given = _from_gguf(open_gguf(task.model)) if kind == "gguf" else _from_safetensors(task.model)
    if task.out.exists() and any(task.out.samefile(path) for path in given.files):
        raise ConfigError(f"{task.out} is what is to be quantized; write to another file")
    return given


def _number(entries: Entries, key: str, default: int) -> int:
    """A count; of a list the largest."""
    value = entries[key].value if key in entries else default
    if isinstance(value, list):
        value = max(value, default=default)
    if type(value) is not int:
        raise FormatError(f"{key} is {value!r:.40}, not a count")
    return value


def _shape_of(arch: str, entries: Entries) -> ModelShape:
    heads = _number(entries, f"{arch}.attention.head_count", 1)
    return ModelShape(
        _number(entries, f"{arch}.block_count", 0),
        _number(entries, f"{arch}.expert_count", 0),
        heads // max(_number(entries, f"{arch}.attention.head_count_kv", heads), 1),
    )


def _from_gguf(model: GGUFModel) -> _Input:
    arch, entries = model.architecture, entries_of(model.files[0])
    for key in list(entries):
        if key.startswith("split.") or is_key_of_other_parts(key.removeprefix(f"{arch}.")):
            del entries[key]
    if entries.get("general.type", entry("model")).value != "model":
        raise UnsupportedError(f"{model.files[0].path} holds a {entries['general.type'].value}, not a model")
    tensors = [tensor for tensor in gguf_tensors(model) if not is_of_other_parts(tensor.name)]
    if others := len(model.tensors) - len(tensors):
        logger.info("%d tensors for images and sound are left out; the file will read text only", others)
    if (table := model.info("token_embd.weight")) is not None:
        _cut_vocabulary(entries, table.shape[0])
    return _Input(arch, entries, tensors, _shape_of(arch, entries), tuple(file.path for file in model.files))


def _cut_vocabulary(entries: Entries, vocab_size: int) -> None:
    """Tokens beyond the embedding table, which llama.cpp would not open: see read_gguf_vocab."""
    kept = cut_vocab({key: one.value for key, one in entries.items() if key.startswith("tokenizer.ggml.")}, vocab_size)
    for key, value in kept.items():
        entries[key] = replace(entries[key], value=value)


def _from_safetensors(folder: Path) -> _Input:
    opened = open_model(EngineConfig(model_path=folder))
    arch, values = hf_metadata(opened.hf_config)
    drafting = MtpNames.of_safetensors(opened.source.stored_names(), opened.facts.num_layers, opened.hf_config)
    if drafting:
        count = sum(len(layer.names) for layer in drafting)
        logger.info("%d tensors of the layer for multi-token prediction are left out; the file will not draft", count)
    tokenizer = load_tokenizer(folder, None)
    entries: Entries = {
        "general.architecture": entry(arch),
        "general.type": entry("model"),
        "general.name": entry(folder.resolve().name),
        **{key: entry(value) for key, value in values.items()},
    }
    if tokenizer.has_vocabulary:
        entries |= vocab_metadata(tokenizer.backend, opened.facts.vocab_size)
    else:
        logger.warning("%s has no tokenizer; the file will hold none either", folder)
        entries["tokenizer.ggml.model"] = entry("no_vocab")
    tensors = hf_tensors(opened.model, opened.facts, opened.source, arch)
    tensors += [_vector(name, values) for name, values in factor_tensors(opened.hf_config).items()]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    plain = {key: one.value for key, one in entries.items() if not key.startswith("tokenizer.")}

    def check() -> None:
        check_opens(arch, plain, shapes)
        check_comes_back(opened.hf_config, plain, shapes)

    return _Input(arch, entries, tensors, _shape_of(arch, entries), opened.files, check)


def _vector(name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> OutTensor:
    return OutTensor(name, values.shape, "F32", lambda: [torch.from_numpy(values).reshape(1, -1)])


def _layout(task: Task, given: _Input) -> GGUFLayout:
    shapes = {tensor.name: tensor.shape for tensor in given.tensors}
    shape = replace(given.shape, has_importance=task.imatrix is not None)
    mixture = MIXTURES[task.mixture]
    types = choose_types(mixture, shapes, shape, task.rules)
    if task.imatrix is None and not task.without_imatrix:
        _check_importance(types)
    entries = dict(given.entries)
    entries["general.quantization_version"] = entry(gguf.GGML_QUANT_VERSION)
    entries["general.file_type"] = entry(int(mixture.file_type))
    if task.imatrix is not None:
        entries |= {f"quantize.imatrix.{key}": entry(value) for key, value in task.imatrix.described().items()}
    # What no mixture chooses stays in F32, as llama.cpp wants vectors and routers.
    placed = [Placed(one.name, one.shape, types.get(one.name, QuantType.F32)) for one in given.tensors]
    return lay_out(given.arch, entries, placed)


def _check_importance(types: Mapping[str, QuantType]) -> None:
    needing = need_importance(types)
    if needing:
        raise ConfigError(
            f"{len(needing)} tensors ({needing[0]}, ...) are to be {types[needing[0]].name}, which needs to know the "
            "columns that matter: give --imatrix a file that `ktransformers imatrix MODEL TEXT -o FILE` wrote, or add "
            "--without_imatrix for a worse model"
        )


def _importance(task: Task, given: _Input) -> Importance:
    if task.imatrix is None:
        return {}
    wanted = [tensor for tensor in given.tensors if is_quantized(tensor.name, tensor.shape)]
    found = {}
    for tensor in wanted:
        one = task.imatrix.importance(tensor.name, tensor.num_matrices, tensor.shape[-1])
        if one is not None:
            found[tensor.name] = one
    missing = [tensor.name for tensor in wanted if tensor.name not in found]
    if not found:
        raise ConfigError(f"{task.imatrix.path} has none of the model's tensors; it is of another model")
    if missing:
        logger.warning("%d matrices (%s, ...) are not in %s", len(missing), missing[0], task.imatrix.path)
    return found


def _warn_of_quantized(given: _Input, layout: GGUFLayout) -> None:
    stored = {tensor.name: tensor.stored for tensor in given.tensors}
    again = [
        one.name for one in layout.tensors if stored[one.name] not in _FLOATS and stored[one.name] != one.qtype.name
    ]
    if again:
        logger.warning(
            "%d tensors (%s, ...) are quantized already and lose more; the model's BF16 weights are better",
            len(again),
            again[0],
        )


def _identity(task: Task, given: _Input) -> str:
    """What the tensors are made of, so that a run goes on only behind one that wrote the same."""
    parts = [f"ktransformers {__version__}"]
    for path in given.files:
        about = path.stat()
        parts.append(f"{path.resolve()} {about.st_size} {about.st_mtime_ns}")
    if task.imatrix is not None:
        parts.append(hashlib.sha256(task.imatrix.path.read_bytes()).hexdigest())
    return "\n".join(parts)
