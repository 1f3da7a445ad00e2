"""Which embeddings look rows up, and by what number they multiply them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ktransformers.operators.recognize.probe import Draws, Unlike, answer, recognizer, twin_of

__all__ = ["recognize_embedding"]

_SCALE, _SCALE_NUMBER = "embed_scale", "scalar_embed_scale"
"""How transformers' modules keep it: a buffer that no file holds, and what it is made from."""


@recognizer("a table of which rows are looked up and scaled")
def recognize_embedding(module: nn.Module) -> float:
    """The number that rows are multiplied by, 1 for a plain nn.Embedding; None for what computes something else.

    The product is that of the module bit by bit: both multiply in fp32 once.
    """
    if type(module) is nn.Embedding:
        return 1.0
    scale, buffers = getattr(module, _SCALE_NUMBER, None), {name for name, _ in module.named_buffers()}
    names = {name for name, _ in module.named_parameters()}
    if not isinstance(scale, float) or buffers != {_SCALE} or names != {"weight"}:
        raise Unlike("it holds other things than a table and a scale")
    factor, ids = torch.tensor(scale), torch.tensor([[2, 0, 3]])
    weight = Draws().normal(4, 8)
    twin = twin_of(module, parameters={"weight": weight}, buffers={_SCALE: factor}, padding_idx=None)
    got = answer(lambda: twin(ids))
    if not torch.equal(got, functional.embedding(ids, weight) * factor):
        raise Unlike("it does something else to the rows")
    return float(factor)
