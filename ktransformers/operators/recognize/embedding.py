"""Recognizes embeddings that look rows up, and the number by which they, and the models around them, multiply rows."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from ktransformers.operators.recognize.probe import (
    Constant,
    NotRecognized,
    ProbeInputs,
    StandIn,
    answer,
    close,
    probe_module,
    recognizer,
)

__all__ = ["recognize_embedding", "recognize_input_scale"]

_SCALE, _SCALE_NUMBER = "embed_scale", "scalar_embed_scale"
"""How transformers' modules keep it: a buffer that no file holds, and what it is made from."""


@recognizer("a table of which rows are looked up and scaled")
def recognize_embedding(module: nn.Module) -> float:
    """Return the number that rows are multiplied by, 1 for a plain nn.Embedding; None for what computes something else.

    The product is that of the module bit by bit: both multiply in fp32 once.
    """
    if type(module) is nn.Embedding:
        return 1.0
    scale, buffers = getattr(module, _SCALE_NUMBER, None), {name for name, _ in module.named_buffers()}
    names = {name for name, _ in module.named_parameters()}
    if not isinstance(scale, float) or buffers != {_SCALE} or names != {"weight"}:
        raise NotRecognized("it holds other things than a table and a scale")
    factor, ids = torch.tensor(scale), torch.tensor([[2, 0, 3]])
    weight = ProbeInputs().normal(4, 8)
    probe = probe_module(module, parameters={"weight": weight}, buffers={_SCALE: factor}, padding_idx=None)
    got = answer(lambda: probe(ids))
    if not torch.equal(got, functional.embedding(ids, weight) * factor):
        raise NotRecognized("it does something else to the rows")
    return float(factor)


@recognizer("a model that scales rows, those that it looks up or all")
def recognize_input_scale(model: nn.Module, table: str) -> float:
    """Return the factor by which `model` multiplies rows that it looks up in its child `table`, and not those that it
    is given; else 1.

    Its layers and norms are left out, so that it answers with what goes into them.
    """
    rows = ProbeInputs().normal(1, 3, 8)
    parts: dict[str, nn.Module] = {
        name: nn.ModuleList() if isinstance(child, nn.ModuleList) else StandIn(lambda x, *_, **__: x)
        for name, child in model.named_children()
    }
    probe = probe_module(model, modules={**parts, table: Constant(rows)})
    others = {"position_ids": torch.arange(3)[None], "use_cache": False}
    handed = answer(lambda: probe(inputs_embeds=rows.clone(), **others)[0])
    looked_up = answer(lambda: probe(input_ids=torch.zeros(1, 3, dtype=torch.int64), **others)[0])
    factor = float((looked_up / handed).median())
    if not close(looked_up, handed * factor):
        raise NotRecognized("it does something else to the rows that it looks up")
    return 1.0 if close(looked_up, handed) else factor
