"""Whether files hold a language model's output head. Models that embed texts are published without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["lacks_head", "settle_head"]

_HEAD = re.compile(r"(.*\.)?(lm_head|embed_out|output|output_layer|head)\.(.+\.)?(weight|qweight)(_.*)?")


def settle_head(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the files hold an output head, or embeddings that stand for one.

    Where they do not, `config` is told in place that embeddings do, so that nothing is missing.
    """
    if not lacks_head(config, shapes):
        return True
    config.tie_word_embeddings = True
    return False


def lacks_head(config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the model has a head of its own by its config, and files with tensors of these shapes hold none.

    A tensor with a row for each token counts as a head, however it is called, except for the embedding table.
    """
    if getattr(config, "tie_word_embeddings", False):
        return False
    vocab_size = getattr(config, "vocab_size", None)
    tables = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == vocab_size]
    return len(tables) == 1 and not any(_HEAD.fullmatch(name) for name in shapes)
