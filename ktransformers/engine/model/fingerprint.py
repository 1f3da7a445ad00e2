"""Identifies what decides the keys, values and states of a model's tokens: who has the same may use what another has
computed.

Two parts, because they differ for different reasons. The model: its text config, names and sizes of its stored tensors,
and all bytes of their files. The arithmetic: how this program computes with it, and what it keeps. Paths, times,
threads, batch and page sizes are in neither, because results do not depend on them.

Reading all bytes takes time, so that it is done once for a file (weights/digests/), and where something is kept that
outlives the process. Until then some bytes of the tensors stand for all of them (`sampled`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec
import torch

from ktransformers.cache.paged import PagedCache
from ktransformers.config import ATTENTION_PRODUCTS
from ktransformers.engine.model.opened import OpenedModel
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.operators.attention.rope import ResolvedRotation
from ktransformers.optimize.plan import Plan
from ktransformers.weights.digests.files import WeightDigest
from ktransformers.weights.digests.samples import digest_of, samples, tensor_sizes

__all__ = ["Identified", "ModelDigests", "ModelIdentity", "identify"]

_WHOLE = "files "
"""In front of a digest of all bytes. What earlier versions saved has digests of some."""

_NOT_OF_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")


class ModelIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """A model as it runs here. config, tensors, data: hex digests of the parts of the model; types: of its weights.

    arithmetic: setting by name. description: in words, for messages; not compared.
    """

    description: str
    types: tuple[str, ...]
    config: str
    tensors: str
    data: str
    arithmetic: dict[str, str]

    @property
    def digest(self) -> bytes:
        """The fingerprint: 32 bytes of everything that is compared."""
        parts = [self.config, self.tensors, self.data, sorted(self.arithmetic.items())]
        return hashlib.blake2b(msgspec.json.encode(parts), digest_size=32).digest()

    @property
    def digests(self) -> ModelDigests:
        """Return those of the model alone."""
        return ModelDigests(self.config, self.tensors, self.data)

    def other_model(self, other: ModelIdentity) -> str | None:
        """Say in words in what way `other` is not this model; None when it is."""
        if other.config != self.config:
            return f"it is of another model ({other.description}); this one is {self.description}"
        if other.types != self.types:
            return f"it is of the model with weights in {_words(other.types)}; here they are in {_words(self.types)}"
        if other.tensors != self.tensors:
            return "it is of a model whose files hold other tensors, or of another size or type"
        if other.data != self.data and other.data.startswith(_WHOLE) == self.data.startswith(_WHOLE):
            return "it is of a model of the same shape with other weights"
        return None

    def other_arithmetic(self, other: ModelIdentity) -> str | None:
        """Say in words in what way `other` computes and keeps numbers differently; None when it does not."""
        names = sorted(
            name
            for name in self.arithmetic.keys() | other.arithmetic.keys()
            if self.arithmetic.get(name) != other.arithmetic.get(name)
        )
        if other.data.startswith(_WHOLE) != self.data.startswith(_WHOLE):
            return "it was saved by a version that looked at some bytes of the weights only"
        if not names:
            return None
        return "; ".join(f"{name} was {_shown(other, name)} and is {_shown(self, name)}" for name in names)


@dataclass(frozen=True, slots=True)
class ModelDigests:
    """Hex digests of the parts of a model, by some bytes of its weights: what does not depend on how it runs."""

    config: str
    tensors: str
    data: str

    @classmethod
    def of(cls, opened: OpenedModel) -> ModelDigests:
        """Read some bytes of the weights' files."""
        config = opened.hf_config.to_dict()
        for name in _NOT_OF_THE_MODEL:
            config.pop(name, None)
        text = json.dumps(config, sort_keys=True, default=str)
        return cls(digest_of([text.encode()]), digest_of(_tensor_facts(opened)), digest_of(samples(opened.source)))


class Identified:
    """A loaded model's identity: by some bytes of its weights (sampled), and by all of them once it is asked for."""

    def __init__(self, sampled: ModelIdentity, weights: WeightDigest):
        self.sampled, self.weights = sampled, weights

    def whole(self) -> ModelIdentity:
        """Return the identity by all bytes of the weights; takes as long as reading the files that no record knows.
        Raises WeightError."""
        if not self.weights.states:  # a model that is made up
            return self.sampled
        return msgspec.structs.replace(self.sampled, data=_WHOLE + self.weights.hex())


def _words(types: tuple[str, ...]) -> str:
    return ", ".join(types) or "no files"


def _shown(identity: ModelIdentity, name: str) -> str:
    return identity.arithmetic.get(name, "nothing")


def identify(opened: OpenedModel, plan: Plan, cache: PagedCache, pool: WorkerPool) -> Identified:
    """Identify a model whose operators are bound, with its cache. Reads some bytes of the weights' files."""
    folders = () if opened.config.kv_disk_path is None else (opened.config.kv_disk_path,)
    return Identified(_sampled(opened, plan, cache, pool), WeightDigest(opened.states, folders))


def _sampled(opened: OpenedModel, plan: Plan, cache: PagedCache, pool: WorkerPool) -> ModelIdentity:
    digests = ModelDigests.of(opened)
    return ModelIdentity(
        description=f"{opened.facts.model_type}, {opened.source.describe()}",
        types=tuple(sorted(opened.stored)),
        config=digests.config,
        tensors=digests.tensors,
        data=digests.data,
        arithmetic=_arithmetic(opened, plan, cache, pool),
    )


def _tensor_facts(opened: OpenedModel) -> Iterator[bytes]:
    """Names and sizes of the stored tensors; and bytes by type, because there are types of one size."""
    yield from tensor_sizes(opened.source)
    for kind, nbytes in sorted(opened.stored.items()):
        yield f"{kind} {nbytes}".encode()


def _arithmetic(opened: OpenedModel, plan: Plan, cache: PagedCache, pool: WorkerPool) -> dict[str, str]:
    config = opened.config
    found = {
        "cpu_quant": str(config.cpu_quant),
        "cpu_prefill": config.cpu_prefill,
        "cpu_bf16": config.cpu_bf16,
        "sparse_attention": config.sparse_attention,
        "the cache": _runs(_kept_layout(cache)),
        "modules": _modules(plan),
    }
    if pool.planes > 1:
        found["cpu_activations"] = config.cpu_activations
    if config.attention_products != ATTENTION_PRODUCTS[0]:
        found["attention_products"] = config.attention_products
    if "BF16" in opened.stored or config.cpu_prefill == "bf16":
        found["the processor"] = "one with products of bf16" if pool.has_bf16 else "one without products of bf16"
    longest = sorted({module.longest for module in opened.model.modules() if isinstance(module, ResolvedRotation)})
    if longest:
        found["the longest position"] = ", ".join(map(str, longest))
    return found


def _modules(plan: Plan) -> str:
    """What computes. Where a GPU does its part results agree up to rounding, whatever runs there."""
    if any(entry.placement.generate_device != "cpu" for entry in plan.entries):
        return "some on a GPU"
    rules = [f"{entry.key} {entry.operator} {entry.generate_op} {entry.prefill_op}" for entry in plan.entries]
    return f"all on the CPU, in the manner {digest_of(line.encode() for line in rules)[:12]}"


def _kept_layout(cache: PagedCache) -> dict[str, str]:
    """What is kept of a token or a sequence, by the tensor's name: kind of device, type, shape."""
    places = {index: shape.place for index, shape in enumerate(cache.shapes)}
    found = {name: _form(tensor, places[int(name.split(".")[0])]) for name, tensor in cache.tensors().items()}
    if cache.states is not None:
        places = {index: shape.place for index, shape in cache.states.shapes.items()}
        for name, tensor in cache.states.tensors().items():
            found[f"state {name}"] = _form(tensor, places[int(name.split(".")[0])])
    return found


def _form(tensor: torch.Tensor, place: str) -> str:
    return f"{place.split(':')[0]} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape[1:])}"


def _runs(layout: Mapping[str, str]) -> str:
    """In words: each form with the layers that have it. Names are "3.keys", or "state 3.conv"."""
    layers: dict[str, list[int]] = {}
    for name, form in layout.items():
        index, part = name.removeprefix("state ").split(".", 1)
        layers.setdefault(f"{part} {form}", []).append(int(index))
    return "; ".join(f"{form} in layers {_ranges(sorted(found))}" for form, found in layers.items())


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, as "0-3,5"."""
    first = [number for number in numbers if number - 1 not in numbers]
    last = [number for number in numbers if number + 1 not in numbers]
    return ",".join(f"{a}-{b}" if a < b else str(a) for a, b in zip(first, last, strict=True))
