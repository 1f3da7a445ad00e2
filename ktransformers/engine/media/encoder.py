"""Runs a tower for the pictures of the store, each once as far as its memory goes."""

from __future__ import annotations

import inspect
import logging
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from ktransformers.engine.media.family import PictureFamily, token_added_to
from ktransformers.engine.media.features import PictureFeatures
from ktransformers.engine.media.positions import RopeIndex
from ktransformers.engine.media.stored import picture_tensors
from ktransformers.engine.media.towers import Tower
from ktransformers.engine.model.tower import FEATURES, picture_host
from ktransformers.errors import MODULE_FAILURES, EngineError, named_reason
from ktransformers.kernels.cpu import WorkerPool
from ktransformers.media.records import MediaItem
from ktransformers.models.composite import text_config_of
from ktransformers.operators.exact import NativeMathMode

__all__ = ["FEATURE_BYTES", "TowerEncoder"]

logger = logging.getLogger(__name__)

FEATURE_BYTES = 256 << 20
"""Of the results that are kept, in RAM, beside the latest one."""


class TowerEncoder:
    """PictureEncoder over a loaded tower. family: of its config. folder: of the store. pool: for products on the CPU.

    Results are on the CPU in fp32. On the CPU they do not depend on other pictures, nor on the number of threads where
    torch's own code does not.
    """

    def __init__(
        self, tower: Tower, family: PictureFamily, folder: Path, pool: WorkerPool, max_bytes: int = FEATURE_BYTES
    ):
        self._tower, self._folder, self._pool, self._max_bytes = tower, folder, pool, max_bytes
        self._host = picture_host(tower.model)
        self.family = replace(family, added_to=token_added_to(self._host))
        self._width = int(text_config_of(tower.model.config).hidden_size)
        self._names = _tensor_names(self._host)
        self._of_config = _named_in_config(self._host)
        self._rope = RopeIndex(self._host)
        self._kept: OrderedDict[bytes, PictureFeatures] = OrderedDict()

    def features(self, digest: bytes) -> PictureFeatures:
        """Return the features of a picture that is in the store. Raises EngineError for one that is not, and for one
        that the tower cannot take."""
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        began = time.perf_counter()
        tensors = picture_tensors(self._folder, digest)
        try:
            found = self._compute(tensors)
        except MODULE_FAILURES as error:
            logger.debug("a picture failed", exc_info=True)
            raise EngineError(
                f"the model's tower fails on picture {digest.hex()[:12]}: {named_reason(error)}"
            ) from error
        self._kept[digest] = found
        while len(self._kept) > 1 and sum(map(_nbytes, self._kept.values())) > self._max_bytes:
            self._kept.popitem(last=False)
        return replace(found, seconds=time.perf_counter() - began)

    def positions(self, token_ids: Sequence[int], media: Sequence[MediaItem]) -> torch.Tensor | None:
        """Return the rotary positions of a prompt, int64 [3, T]; None: 0 to T - 1, whatever they show.

        Raises EngineError for a picture that is not in the store.
        """
        if self._rope.is_numbered_through or not media:
            return None
        tensors = [picture_tensors(self._folder, item.digest, self._rope.names.__contains__) for item in media]
        return self._rope.of(token_ids, tensors)

    def _compute(self, tensors: Mapping[str, torch.Tensor]) -> PictureFeatures:
        place = self._tower.place.device
        given = {name: place.to_device(tensor) for name, tensor in tensors.items() if name in self._names}
        left = tensors.keys() - given.keys()
        if left:
            logger.debug("the tower takes no %s", ", ".join(sorted(left)))
        ran = list[torch.nn.Module]()
        projector = getattr(self._host, "multi_modal_projector", None)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._tower.running())
            if not place.is_gpu:
                stack.enter_context(NativeMathMode(self._pool))
            if projector is not None:
                stack.callback(projector.register_forward_hook(lambda module, *_: ran.append(module)).remove)
            output = getattr(self._host, FEATURES)(**given, **self._of_config, return_dict=True)
            hidden, added = _of_output(output), _added(getattr(output, "deepstack_features", None) or ())
            if projector is not None and not ran:  # Llama 4's composite calls it outside of that
                hidden = projector(_rows(hidden))
            by_layer = {layer: self._checked(each) for layer, each in added.items()}
            if hidden is None and by_layer:  # Granite 4 Vision's composite shows zeros, and adds all that it has
                return PictureFeatures(torch.zeros_like(next(iter(by_layer.values()))), by_layer)
            return PictureFeatures(self._checked(hidden), by_layer)

    def _checked(self, hidden: object) -> torch.Tensor:
        """Rows [N, H] on the CPU in fp32. Raises ValueError for rows of another width than the model's."""
        rows = _rows(hidden)
        if rows.shape[-1] != self._width:
            raise ValueError(f"its rows have {rows.shape[-1]} elements, and the language model's {self._width}")
        return rows.to("cpu", torch.float32)


def _tensor_names(host: torch.nn.Module) -> frozenset[str]:
    """Names of tensors that a composite takes: its `get_image_features`, or its forward, which hands more down."""
    functions = (getattr(type(host), FEATURES), type(host).forward)
    return frozenset(name for function in functions for name in inspect.signature(function).parameters)


def _named_in_config(host: torch.nn.Module) -> dict[str, object]:
    """Arguments without a default that a composite's `get_image_features` wants handed what its config says: Llama 4's,
    in transformers 5.17.
    """
    config = host.config
    wanted = [
        parameter.name
        for parameter in inspect.signature(getattr(type(host), FEATURES)).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    ]
    places = config, getattr(config, "vision_config", None)
    return {name: getattr(place, name) for place in reversed(places) for name in wanted if hasattr(place, name)}


def _of_output(output: object) -> object:
    """What `get_image_features` returns in its different forms: rows, or a tensor of rows for each picture or tile."""
    if not hasattr(output, "last_hidden_state"):
        return output
    pooled = getattr(output, "pooler_output", None)
    return output.last_hidden_state if pooled is None else pooled


def _added(features: Sequence[object]) -> dict[int, object]:
    """What is added behind which layer: features in the order of layers, or pairs of the layer that they stand in front
    of and features."""
    pairs = [one for one in features if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], int)]
    return {layer - 1: one for layer, one in pairs} if pairs else dict(enumerate(features))


def _rows(hidden: object) -> torch.Tensor:
    """[N, H] of one picture."""
    if isinstance(hidden, torch.Tensor):
        return hidden.reshape(-1, hidden.shape[-1])
    if not isinstance(hidden, list | tuple):
        raise TypeError(f"it returns a {type(hidden).__name__}")
    return torch.cat([_rows(part) for part in hidden])


def _nbytes(features: PictureFeatures) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (features.hidden, *features.by_layer.values()))
