"""Sorts the files of a repository into models: GGUF files by quantization, their shards together, or safetensors.

Works on names alone, so that the hub's listing and a folder of the cache are read alike.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from ktransformers.errors import ConfigError
from ktransformers.hub.names import ModelName
from ktransformers.system.file_kinds import MTP_PREFIX, drafter_rank, is_drafter, is_projector, projector_rank

__all__ = ["SAFETENSORS", "Variant", "find_variants", "is_companion", "select"]

SAFETENSORS = "safetensors"
"""What the variant is called that is no quantization but the folder with config.json."""

_SHARD = re.compile(r"(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)
_QUANT = re.compile(
    r"(?<![A-Za-z0-9])((?:UD-)?(?:I?Q[1-8](?:_[A-Z0-9]+)*|TQ[12]_0|MXFP4(?:_MOE)?|NVFP4|BF16|F16|F32|FP16|FP32))"
    r"(?![A-Za-z0-9])",
    re.IGNORECASE,
)
_FULL = {"F32", "FP32", "F16", "FP16", "BF16"}
_SIDE_FILES = (
    *("config.json", "generation_config.json", "model.safetensors.index.json", "chat_template.jinja"),
    *("preprocessor_config.json", "processor_config.json"),
)
_TOKENIZER_FILES = re.compile(
    r"(tokenizer|tiktoken|special_tokens|added_tokens|vocab|merges|chat_template).*\.(json|model|txt)"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """A model of a repository. label: as one types it after the colon. weights: shards in order; side: all others.

    missing: names of shards that belong to it and are not there.
    """

    label: str
    weights: tuple[str, ...]
    side: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the model, small ones first: what is wrong with them shows at once."""
        return (*self.side, *self.weights)

    @property
    def is_gguf(self) -> bool:
        return self.label != SAFETENSORS

    @property
    def is_quantized(self) -> bool:
        """Whether the model has fewer than 16 bits per weight by its name."""
        return self.is_gguf and self.label.upper() not in _FULL


def is_companion(path: str) -> bool:
    """Whether a GGUF file is no language model: a projector for pictures, what drafts for a model, or statistics for
    quantizing."""
    name = PurePosixPath(path).name
    return name.lower().endswith(".gguf") and (is_projector(name) or is_drafter(name) or "imatrix" in name.lower())


def find_variants(paths: Iterable[str], *, with_code: bool = False) -> list[Variant]:
    """Return the models that the files `paths` (relative, with slashes) make.

    with_code: Python files belong to safetensors.
    Pickles (.bin, .pt, .pth) are never part of a model.
    """
    paths = sorted(paths)
    groups: dict[tuple[str, str, int], list[str]] = {}
    for path in paths:
        if path.lower().endswith(".gguf") and not is_companion(path):
            groups.setdefault(_group(path), []).append(path)
    labels = [_label(folder, stem) for folder, stem, _ in groups]
    variants = []
    for (folder, stem, count), label in zip(groups, labels, strict=True):
        files = groups[folder, stem, count]
        if labels.count(label) > 1:  # several models in one repository
            label = f"{folder}/{stem}".lstrip("/")
        side = (
            *_beside(paths, folder, is_projector, projector_rank),
            *_beside(paths, folder, _is_mtp, partial(drafter_rank, model=files[0])),
        )
        variants.append(Variant(label, tuple(files), side, missing=_missing_shards(files, folder, stem, count)))
    safetensors = _safetensors(paths, with_code)
    return variants if safetensors is None else [*variants, safetensors]


def _is_mtp(name: str) -> bool:
    return name.startswith(MTP_PREFIX)


def _beside(
    paths: Sequence[str], folder: str, is_wanted: Callable[[str], bool], rank: Callable[[str], tuple[int, str]]
) -> tuple[str, ...]:
    """What a GGUF in `folder` finds there or above, of several what comes first; () where there is none."""
    for where in (folder, folder.rpartition("/")[0]):
        beside = (path for path in paths if path.lower().endswith(".gguf") and path.rpartition("/")[0] == where)
        found = [path for path in beside if is_wanted(path.rpartition("/")[2])]
        if found:
            return (min(found, key=lambda path: rank(path.rpartition("/")[2])),)
    return ()


def _group(path: str) -> tuple[str, str, int]:
    """(folder, name without shard number, how many shards; 0 for a whole file)."""
    folder, _, name = path.rpartition("/")
    match = _SHARD.fullmatch(name)
    return (folder, match["stem"], int(match["count"])) if match else (folder, name[: -len(".gguf")], 0)


def _label(folder: str, stem: str) -> str:
    for text in (stem, folder.rpartition("/")[2]):
        if found := _QUANT.findall(text):
            return str(found[-1]).upper()
    return stem


def _missing_shards(files: Sequence[str], folder: str, stem: str, count: int) -> tuple[str, ...]:
    prefix = f"{folder}/{stem}" if folder else stem
    wanted = [f"{prefix}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]
    return tuple(name for name in wanted if name not in files)


def _safetensors(paths: Sequence[str], with_code: bool) -> Variant | None:
    """Those of the repository's top folder; what lies deeper is another format's or another model's."""
    top = [path for path in paths if "/" not in path]
    weights = tuple(path for path in top if path.endswith(".safetensors"))
    if not weights or "config.json" not in top:
        return None
    side = [path for path in top if path in _SIDE_FILES or _TOKENIZER_FILES.fullmatch(path)]
    side += [path for path in paths if path.endswith(".py") and with_code]
    return Variant(SAFETENSORS, weights, tuple(side))


def select(variants: Sequence[Variant], name: ModelName) -> Variant | None:
    """Return the variant that `name` asks for, None when it does not say which.

    Raises ConfigError when there is no such.
    """
    if name.file is not None:
        found = [variant for variant in variants if name.file in variant.weights]
        if not found:
            near = difflib.get_close_matches(name.file, [path for v in variants for path in v.weights], n=1)
            raise ConfigError(
                f"{name.repo_id} has no file {name.file}" + (f"; did you mean {near[0]}?" if near else "")
            )
        return found[0]
    if name.quant is None:
        return None
    asked = name.quant.lower()
    spellings: tuple[Callable[[Variant], str], ...] = (
        lambda variant: variant.label.lower(),
        lambda variant: variant.label.lower().removeprefix("ud-"),  # Unsloth's dynamic quantizations
        lambda variant: _group(variant.weights[0].lower())[1] if variant.is_gguf else SAFETENSORS,
    )
    for spell in spellings:
        found = [variant for variant in variants if spell(variant) == asked]
        if len(found) == 1:
            return found[0]
    labels = [variant.label for variant in variants]
    near = difflib.get_close_matches(name.quant.upper(), labels, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise ConfigError(f"{name.repo_id} has no {name.quant}{hint} It has: {', '.join(labels)}")
