"""Sampling settings that a GGUF file recommends, as its converter took them from generation_config.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from ktransformers.errors import FormatError

__all__ = ["sampling_defaults"]

logger = logging.getLogger(__name__)

_PREFIX = "general.sampling."
_NAMES = {  # the key's end: ours, and the least and the most that it may be
    "temp": ("temperature", 0.0, math.inf),
    "top_k": ("top_k", 0.0, math.inf),
    "top_p": ("top_p", 0.0, 1.0),
    "min_p": ("min_p", 0.0, 1.0),
    "penalty_repeat": ("repetition_penalty", 0.0, math.inf),
}


def sampling_defaults(metadata: Mapping[str, object]) -> dict[str, object]:
    """Return the settings under the names of generation_config.json; empty when the file recommends none.

    Settings that this program does not have are named once in the log. Raises FormatError for values out of range.
    """
    said = {key.removeprefix(_PREFIX): value for key, value in metadata.items() if key.startswith(_PREFIX)}
    found: dict[str, object] = {}
    for key, (name, least, most) in _NAMES.items():
        value = said.get(key)
        if value is None:
            continue
        if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
            raise FormatError(f"{_PREFIX}{key} is {value!r:.40}; a number from {least:g} to {most:g} is needed")
        found[name] = value if isinstance(value, int) else float(f"{value:.7g}")
    if found.keys() - {"repetition_penalty"}:
        found["do_sample"] = True
    if others := sorted(said.keys() - _NAMES.keys()):
        logger.info("the GGUF file's %s are left aside: no sampler here has them", ", ".join(others))
    return found
