"""What a family of models does with the positions of pictures besides showing them: found by asking its config and its
masks."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from ktransformers.engine.model.tower import FEATURES
from ktransformers.errors import MODULE_FAILURES, UnsupportedError, named_reason
from ktransformers.media.records import Sight
from ktransformers.models.composite import text_config_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["PictureFamily", "token_added_to"]

logger = logging.getLogger(__name__)

_TYPES = (0, 0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0)
"""By position, 1: a picture's. Of two pictures, one as long as _WINDOW and one that is longer."""
_WINDOW = 4

_AROUND = re.compile("(image|video)_(start|end)_token_id")

_AXES = 3

_Masks = torch.Tensor | Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class PictureFamily:
    """Facts of a composite model about positions of pictures.

    token_id: the token that stands there for what looks tokens up (inputs of single layers, n-grams, drafters).
    sight: what a position of a picture sees. ends_in_full, ends_in_windows: in which layers it sees that; see
    PictureRows. keeps_starts: whether in the latter it sees the picture's beginning, too, where the window ends before.
    added_to: the token whose embedding hidden states of pictures are added to; None: they take its place.
    around: tokens around pictures that are routed to the experts for pictures as they are; None: there are no such.
    """

    token_id: int
    sight: Sight = Sight.NOTHING
    ends_in_full: bool = False
    ends_in_windows: bool = False
    keeps_starts: bool = False
    around: frozenset[int] | None = None
    added_to: int | None = None

    @classmethod
    def of(cls, whole: PretrainedConfig) -> PictureFamily:
        """Return the facts of a composite's config. Raises UnsupportedError for a family whose pictures cannot be run
        as transformers runs them."""
        from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

        if type(whole) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            raise UnsupportedError(f"transformers has no class for images and text of model type {whole.model_type}")
        found, text = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(whole)], text_config_of(whole)
        if (why := _why_not(whole, found)) is not None:
            raise UnsupportedError(f"model type {whole.model_type} {why}")
        token_id = getattr(whole, "image_token_id", None)
        if getattr(text, "hidden_size_per_layer_input", 0):  # as transformers asks for the inputs of layers there
            token_id = getattr(text, "pad_token_id", None)
        if not isinstance(token_id, int) or not 0 <= token_id < text.vocab_size:
            token_id = 0
        around = None
        if "moe_mm_token_type_ids" in inspect.signature(found.forward).parameters:
            around = frozenset(value for name, value in vars(whole).items() if _AROUND.fullmatch(name))
        return cls(token_id, *_sight(whole, found), around=around)


def _why_not(whole: PretrainedConfig, found: type[PreTrainedModel]) -> str | None:
    """Why a composite's pictures cannot be run, whatever it masks; None where nothing is known."""
    if getattr(whole, "visual_indicator_token_ids", None):
        return "has embeddings of its tower for tokens around pictures, too, which are not shown (visual_indicator_*)"
    features = getattr(found, FEATURES, None)
    of_text = (
        [] if features is None else [name for name in inspect.signature(features).parameters if "input_ids" in name]
    )
    if of_text:
        return f"has a tower that reads the prompt, too ({of_text[0]}): what a picture becomes depends on the question"
    rope = getattr(text_config_of(whole), "rope_parameters", None) or {}
    if len(sections := rope.get("mrope_section") or ()) > _AXES:
        return f"turns positions of pictures along {len(sections)} axes, and {_AXES} are known"
    return None


_Layers = tuple[bool, bool, bool]
"""ends_in_full, ends_in_windows, keeps_starts."""


def _sight(whole: PretrainedConfig, found: type[PreTrainedModel]) -> tuple[Sight, bool, bool, bool]:
    """What rows of pictures see, as PictureFamily has it. Only families that mask pictures have a function for it.
    found: the composite's class."""
    make: Callable[..., _Masks] | None = getattr(found, "create_masks_for_generate", None)
    names = inspect.signature(make).parameters if make is not None else {}
    kinds = [name for name in names if name.endswith("token_type_ids")]
    if make is None or not kinds:
        return Sight.NOTHING, False, False, False
    config = copy.deepcopy(whole)
    for part in (config, text_config_of(config)):
        part._attn_implementation = "eager"
        if getattr(part, "sliding_window", None):
            part.sliding_window = _WINDOW
    count = len(_TYPES)
    given: dict[str, object] = {name: None for name in ("attention_mask", "cache", "past_key_values") if name in names}
    given["position_ids"] = torch.arange(count)[None]

    def masks(types: torch.Tensor) -> dict[str, torch.Tensor]:
        try:
            made = make(
                config=config,
                inputs_embeds=torch.zeros(1, count, 1),
                **given,
                **dict.fromkeys(kinds, types[None]),
            )
        except MODULE_FAILURES as error:
            raise UnsupportedError(
                f"model type {whole.model_type} says in another way what pictures see: {named_reason(error)}"
            ) from error
        layers: Mapping[str, torch.Tensor | None] = made if isinstance(made, Mapping) else {"full_attention": made}
        return {name: mask[0, 0] == 0 for name, mask in layers.items() if mask is not None}

    types = torch.tensor(_TYPES)
    pictures = (types * (types != types.roll(1))).cumsum(0) * types
    # Where 0 is the type of a prompt, and not of text beside pictures, all of it is one.
    for sight, said, numbers in (
        (Sight.PROMPT, torch.zeros_like(types), torch.ones_like(types)),
        (Sight.PICTURE, types, pictures),
        (Sight.PICTURES, types, types),
    ):
        read = _read(masks(said), numbers)
        if read is not None and any(read):
            return sight, *read
    if read is None:
        raise UnsupportedError(f"model type {whole.model_type} masks pictures in a way that is not known")
    return Sight.NOTHING, False, False, False


def _read(seen: Mapping[str, torch.Tensor], numbers: torch.Tensor) -> _Layers | None:
    """In which layers positions see what has the same number, above 0; None where they see something else. seen: bool
    [T, T] by kind of layers: which positions (columns) a row sees."""
    rows, columns = torch.arange(len(numbers))[:, None], torch.arange(len(numbers))
    causal, same = columns <= rows, (numbers[:, None] == numbers) & (numbers > 0)
    near = columns > rows - _WINDOW
    full = {False: causal, True: causal | same}
    windows = {
        (False, False): causal & near,
        (True, False): (causal | same) & near,
        (True, True): (causal & near) | same,
    }
    ends_in_full, (ends_in_windows, keeps_starts) = False, (False, False)
    for name, mask in seen.items():
        if name == "full_attention":
            match = [kind for kind, wanted in full.items() if torch.equal(mask, wanted)]
            ends_in_full = bool(match) and match[0]
        else:
            match = [kind for kind, wanted in windows.items() if torch.equal(mask, wanted)]  # type: ignore[misc]
            ends_in_windows, keeps_starts = match[0] if match else (False, False)  # type: ignore[misc]
        if not match:
            return None
    return ends_in_full, ends_in_windows, keeps_starts


class _HeardError(Exception):
    """Ends a forward once its language model has been called."""


class _Listener(nn.Module):
    """In the place of a composite's language model."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: torch.Tensor | None = None

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **kwargs: object) -> object:
        self.heard = inputs_embeds
        raise _HeardError


def token_added_to(host: nn.Module) -> int | None:
    """Return the token to whose embedding a composite adds the hidden states of pictures; None where it puts them in
    the place of that. It is asked, with a picture of two positions; None, with a line for debugging, where that fails.

    host: the part of it that takes pictures; its language model is not needed.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    config = host.config
    width, token = int(text_config_of(config).hidden_size), getattr(config, "image_token_id", None)
    if not isinstance(token, int):
        return None
    ids, shown = torch.tensor([[token, token]]), torch.full((2, width), 3.0)
    listener = _Listener()
    with _listening(host, listener, torch.full((1, 2, width), 2.0)):
        try:
            host(input_ids=ids, mm_encoder_outputs={"image": BaseModelOutputWithPooling(pooler_output=(shown,))})
        except _HeardError:
            pass
        except MODULE_FAILURES as error:
            logger.debug("a composite cannot be asked whether it adds features: %s", named_reason(error))
    return token if listener.heard is not None and bool((listener.heard == 5.0).all()) else None


@contextmanager
def _listening(host: nn.Module, listener: nn.Module, embedded: torch.Tensor) -> Iterator[None]:
    """Have `listener` in the place of what was taken out of a composite, and `embedded` for its tokens."""
    taken = {name: module for name, module in host._modules.items() if module is None or _is_decoder(module)}
    host._modules.update(dict.fromkeys(taken, listener))
    host.get_input_embeddings = lambda: lambda ids: embedded  # type: ignore[assignment]
    try:
        yield
    finally:
        del host.get_input_embeddings
        host._modules.update(taken)


def _is_decoder(module: nn.Module) -> bool:
    return hasattr(module, "embed_tokens")
