"""Pixels to what a model's tower takes and to the text of its prompt, by transformers' own processor of the model.

Runs in the child process. No family is known here by name: processor, tokenizer and config are asked.
"""

from __future__ import annotations

import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image

from ktransformers.errors import MODULE_FAILURES, ConfigError, reason_of
from ktransformers.media.limits import MAX_PIXELS
from ktransformers.media.torchvision import prepare_torchvision

__all__ = ["Processed", "Processor"]

_log = logging.getLogger(__name__)

_OF_TEXT = re.compile("input_ids|attention_mask|labels|.*token_type_ids")
_POSITION_FIELDS = ("image_token_id", "image_token_index", "media_placeholder_token_id")
_LIBRARIES = ("transformers", "torch", "torchvision", "numpy", "pillow")
"""Whose versions decide how pixels are resized and rounded."""

_BORDER = "0123456789"
"""Stands before and behind the placeholder when it is processed, so that what a processor writes around the whole text
is told from what it writes for the picture."""

_LOW_SIDE = 512
"""Pixels a side that `low` leaves of a picture, as OpenAI's does."""

_SWITCHES = ("do_pan_and_scan", "do_image_splitting", "crop_to_patches")
"""Settings of image processors that add cuts of a picture to it."""

_SOFT_TOKENS = {"low": 70, "high": 1120}
"""Of Gemma 4, whose pictures have one of five numbers of positions."""


@dataclass(frozen=True, slots=True)
class Processed:
    """A picture that was processed. tensors: by the processor's names. The others: see ReadPicture."""

    tensors: Mapping[str, torch.Tensor]
    digest: bytes
    text: str
    num_positions: int
    lead: int = 0
    trail: int = 0
    closing: str = ""


class _NoVideos(dict[str, object]):
    """Stands for the processor of videos, which needs torchvision, and which pictures do not need. {} in JSON."""

    model_input_names: tuple[str, ...] = ()


class Processor:
    """The processor in a model's folder. Code that comes with the model is not run. tower: see ChildReader. Raises
    ConfigError."""

    def __init__(self, folder: Path, note: Callable[[str], None], tower: bytes = b""):
        prepare_torchvision()
        with _quiet():
            self._processor = _load(folder)
            self._record = _Record(self._processor.tokenizer)
        bound_squares(self._processor.image_processor)
        placeholder = getattr(self._processor, "image_token", None)
        if not isinstance(placeholder, str) or not placeholder:
            raise ConfigError(f"{type(self._processor).__name__} in {folder} names no token for pictures")
        self.placeholder = placeholder
        self.position_token_ids = _position_ids(folder, self._processor)
        self._closing: str | None = None
        self._recipe = _recipe((self._processor, self._processor.image_processor), tower)
        if "Pil" in type(self._processor.image_processor).__name__:
            note("pictures are resized by Pillow: torchvision is not there (pip install ktransformers-engine[images])")

    def process(self, image: Image.Image, detail: str) -> Processed:
        """Process a picture in mode RGB. detail: of limits.DETAILS. Raises ConfigError."""
        text, settings = f"{_BORDER}{self.placeholder}{_BORDER}", self._settings(detail)
        try:
            made, written = self._made([image], text, settings)
        except Exception as error:  # whatever a processor does with a picture of a shape that it was not made for
            width, height = image.size
            is_large = isinstance(error, MemoryError)
            reason = "it takes too much memory; make it smaller, or less narrow" if is_large else reason_of(error)
            raise ConfigError(
                f"the model's processor refuses the picture of {width} x {height} pixels: {reason}"
            ) from error
        parts = written.split(_BORDER)
        if len(parts) != 3:
            raise ConfigError(f"{type(self._processor).__name__} writes pictures in a way that is not supported")
        ids = self._record.tokenizer(parts[1], add_special_tokens=False)["input_ids"]
        num_positions = sum(one in self.position_token_ids for one in ids)
        tensors = {name: _tensor(name, value) for name, value in made.items() if not _OF_TEXT.fullmatch(name)}
        if not num_positions or not tensors:
            raise ConfigError(f"{type(self._processor).__name__} makes no positions of a picture")
        digest, closing = self._digest(image, settings, parts[1]), self._closing_of(image, parts[1])
        return Processed(tensors, digest, parts[1], num_positions, *self._margins(ids), closing)

    def _made(
        self, images: list[Image.Image], text: str, settings: Mapping[str, object]
    ) -> tuple[Mapping[str, object], str]:
        """Return what the processor makes of pictures, and the text in which they have taken their places."""
        self._record.text = None
        with _quiet(), torch.inference_mode():
            made = self._processor(
                images=images,
                text=[text],
                images_kwargs=settings,
                text_kwargs={"padding": False},  # which some ask for, of tokenizers that need not have a token for it
                return_tensors="pt",
            )
        return made, self._record.text or ""

    def _closing_of(self, image: Image.Image, text: str) -> str:
        """The end of a picture's text that only the last one of a prompt has (PaliGemma's <bos>). Asked once, with two
        pictures: the first one that a process reads is small."""
        if self._closing is None:
            try:
                _, written = self._made([image] * 2, _BORDER.join(("", self.placeholder, self.placeholder, "")), {})
            except MODULE_FAILURES as error:  # of a family that takes one picture, or two in another way
                _log.debug("two pictures of one prompt: %s", reason_of(error))
                written = ""
            parts = written.split(_BORDER)
            is_of_last = len(parts) == 4 and parts[2] == text and text.startswith(parts[1])
            self._closing = text[len(parts[1]) :] if is_of_last else ""
        return self._closing if text.endswith(self._closing) else ""

    def _margins(self, ids: Sequence[int]) -> tuple[int, int]:
        """How many tokens of a picture's text in front of its first position, and behind its last one, are of the
        picture by the processor's types of tokens (`mm_token_type_ids`), next to each other."""
        if not getattr(self._processor, "return_mm_token_type_ids", False):
            return 0, 0
        types = self._processor.create_mm_token_type_ids([list(ids)])[0]
        places = [place for place, one in enumerate(ids) if one in self.position_token_ids]
        before = takewhile(bool, reversed(types[: places[0]]))
        return sum(1 for _ in before), sum(1 for _ in takewhile(bool, types[places[-1] + 1 :]))

    def _digest(self, image: Image.Image, settings: dict[str, object], text: str) -> bytes:
        """32 bytes of all that decides the tensors, how many positions they have and what the tower makes of them. The
        tensors themselves are eight times as many bytes as the pixels."""
        made = blake2b(self._recipe, digest_size=32)
        made.update(json.dumps([settings, text, image.size], sort_keys=True).encode())
        made.update(image.tobytes())
        return made.digest()

    def _settings(self, detail: str) -> dict[str, object]:
        """What `detail` changes of the image processor's own settings, where it has them. No size that is so anyway: it
        would make another digest of the same picture."""
        if detail == "auto":
            return {}
        own = self._processor.image_processor
        made: dict[str, object] = {name: detail == "high" for name in _SWITCHES if hasattr(own, name)}
        if hasattr(own, "max_soft_tokens"):
            made["max_soft_tokens"] = _SOFT_TOKENS[detail]
        size: Any = getattr(own, "size", None)
        longest = getattr(size, "longest_edge", None)
        if detail == "low" and isinstance(longest, int):
            # Of some it is a side, of others all pixels: no side is that long.
            low = _LOW_SIDE * _LOW_SIDE if longest > 1 << 15 else _LOW_SIDE
            given = {name: value for name, value in dict(size).items() if value is not None}
            less = {**given, **{name: min(edge, low) for name, edge in given.items() if "_edge" in name}}
            made |= {"size": less} if less != given else {}
        return made


def bound_squares(image_processor: object) -> None:
    """Have an image processor raise MemoryError in place of padding a picture to a square of more than MAX_PIXELS.

    That takes minutes, and some do it before they make the picture smaller.
    """
    kind = type(image_processor)
    pad: Callable[..., object] | None = getattr(kind, "pad_to_square", None)
    if pad is None:
        return

    def pad_to_square(self: object, images: torch.Tensor, *args: object, **kwargs: object) -> object:
        if max(images.shape) ** 2 > MAX_PIXELS:
            raise MemoryError
        return pad(self, images, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}  # they go into digests of pictures
    image_processor.__class__ = type(kind.__name__, (kind,), {**names, "pad_to_square": pad_to_square})


class _Record:
    """What a processor gives its tokenizer: the text in which pictures have taken their places."""

    def __init__(self, tokenizer: Any):
        self.text: str | None = None
        self.tokenizer = tokenizer
        record = self

        def call(self: object, text: object = None, *args: object, **kwargs: object) -> object:
            record.text = str(text[0]) if isinstance(text, list) else str(text or "")
            return kind.__call__(self, text, *args, **kwargs)

        kind = type(tokenizer)
        tokenizer.__class__ = type(kind.__name__, (kind,), {"__call__": call})


def _load(folder: Path) -> Any:
    from transformers import AutoProcessor
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor
    from transformers.processing_utils import ProcessorMixin

    own_check: Any = ProcessorMixin.check_argument_for_proper_class

    def check(self: object, name: str, argument: object) -> object:
        return _NoVideos if isinstance(argument, _NoVideos) else own_check(self, name, argument)

    AutoVideoProcessor.from_pretrained = staticmethod(lambda *args, **kwargs: _NoVideos())
    ProcessorMixin.check_argument_for_proper_class = check
    try:
        made = AutoProcessor.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a processor's class does with values of the wrong type
        why = reason_of(error)
        if "orchvision" in str(error):
            why = "its class is written for torchvision alone: pip install ktransformers-engine[images]"
        raise ConfigError(f"the processor of pictures in {folder} cannot be loaded: {why}") from error
    if not hasattr(made, "image_processor") or not hasattr(made, "tokenizer"):
        raise ConfigError(f"{folder} holds no processor of pictures and text that transformers knows")
    return made


def _position_ids(folder: Path, processor: Any) -> frozenset[int]:
    """The ids whose positions the tower fills: as the model's config names them, whose forward looks for them."""
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:  # as above
        raise ConfigError(f"{folder / 'config.json'} cannot be used: {reason_of(error)}") from error
    for owner in (config, processor):
        for name in _POSITION_FIELDS:
            found = getattr(owner, name, None)
            if isinstance(found, int) and found >= 0:
                return frozenset({found})
    raise ConfigError(f"{folder}: neither config nor processor names the token of a picture's positions")


class _Described(Protocol):
    """What is asked of transformers' processors."""

    def to_json_string(self) -> str: ...


def _recipe(processors: Sequence[_Described], tower: bytes) -> bytes:
    """32 bytes of the tower and of what makes tensors of pixels: classes, settings, versions of the libraries."""
    made = [tower.hex(), *(f"{type(one).__module__}.{type(one).__qualname__}" for one in processors)]
    made += [one.to_json_string() for one in processors]  # keys in order, no folders, no chat template
    made += map(_version, _LIBRARIES)
    return blake2b(json.dumps(made).encode(), digest_size=32).digest()


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # torchvision need not be there
        return ""


def _tensor(name: str, value: object) -> torch.Tensor:
    """A value of a processor as one tensor of its own memory. Raises ConfigError for what is none."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], torch.Tensor):
        value = value[0][None]
    if not isinstance(value, torch.Tensor):
        raise ConfigError(f"the model's processor gives {name} as {type(value).__name__}, which is not supported")
    return value.detach().cpu().contiguous()


@contextmanager
def _quiet() -> Iterator[None]:
    """transformers' own lines are about things that its callers chose; here nobody did."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
