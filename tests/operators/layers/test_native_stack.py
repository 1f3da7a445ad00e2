"""Layers that run together in one native call: which do, and that nothing of what they compute changes.

The oracle is the same model with its layers one by one, which test_fused compares with `transformers`.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from benchmarks.sequence import SequenceRunner
from ktransformers.cache.static import StaticCache
from ktransformers.kernels.cpu.layer import LayerKv
from ktransformers.kernels.cpu.stack import NativeLayerStack
from ktransformers.operators.layers.cpu import FusedLayer, fuse_layers
from ktransformers.operators.layers.joined import Done
from ktransformers.operators.layers.native_stack import MOST_ROWS, NativeStack, stack_cpu_layers
from ktransformers.operators.layers.traced import decoder_layers
from tests.support.engines.runners import calls_of, fused_runner, random_ids, runner_of, stacked_runner
from tests.support.models.family_models import family_config
from tests.support.models.recurrent_models import recurrent_model
from tests.support.models.tiny_models import random_model, tiny_model

LATENT, RECURRENT = ("deepseek_v2", "deepseek_v3"), ("qwen3_next", "qwen3_5_moe_text")
WHOLE = ("llama", "qwen3", "mixtral", "qwen3_moe", "qwen2_moe", *LATENT, *RECURRENT)


def model_of(family: str) -> nn.Module:
    return recurrent_model(family) if family in RECURRENT else tiny_model(family)


def in_pieces(runner: SequenceRunner, ids: list[int], sizes: list[int]) -> torch.Tensor:
    parts, start = [], 0
    for size in sizes:
        parts.append(runner.forward(ids[start : start + size], start, range(size)).clone())
        start += size
    assert start == len(ids)
    return torch.cat(parts)


@pytest.mark.parametrize("family", WHOLE)
def test_logits_are_those_of_the_layers_one_by_one(family: str) -> None:
    """Steps of one row, of some, and of more than run together, each behind the others."""
    model = model_of(family)
    stacked, fused = (make(model, max_len=160) for make in (stacked_runner, fused_runner))
    (stack,) = decoder_layers(stacked.model)
    assert isinstance(stack, NativeStack)
    assert len(stack.layers) == len(decoder_layers(fused.model))
    sizes = [5, 1, 1, MOST_ROWS, MOST_ROWS + 1, 1, 7]
    ids = random_ids(stacked.vocab_size, sum(sizes))
    assert torch.equal(in_pieces(stacked, ids, sizes), in_pieces(fused, ids, sizes))


@pytest.mark.parametrize("kv_type", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_caches_of_narrow_types_are_written_and_read_alike(family: str, kv_type: str) -> None:
    model = tiny_model(family)
    stacked, fused = stacked_runner(model, kv_type), fused_runner(model, kv_type)
    ids = random_ids(stacked.vocab_size, 21)
    assert torch.equal(in_pieces(stacked, ids, [17, 1, 3]), in_pieces(fused, ids, [17, 1, 3]))


def test_one_kernel_call_computes_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = stacked_runner(tiny_model("qwen3_moe"))
    calls: list[int] = []
    forward = NativeLayerStack.forward
    monkeypatch.setattr(
        NativeLayerStack, "forward", lambda self, x, *rest: (calls.append(len(x)), forward(self, x, *rest))[1]
    )
    monkeypatch.setattr(FusedLayer, "forward", None)
    runner.forward(random_ids(runner.vocab_size, 4), 0, [3])
    assert calls == [4]


def test_another_cache_is_found_and_none_is_kept_alive() -> None:
    model = tiny_model("qwen3_moe")
    stacked, fused = stacked_runner(model), fused_runner(model)
    ids = random_ids(stacked.vocab_size, 9)
    want = in_pieces(fused, ids, [8, 1])
    first = stacked.cache
    assert torch.equal(in_pieces(stacked, ids, [8, 1]), want)
    stacked.cache, gone = StaticCache(list(first.shapes), 32), weakref.ref(first)
    stacked.written_len = 0
    del first
    gc.collect()
    assert gone() is None
    assert torch.equal(in_pieces(stacked, ids, [8, 1]), want)


def test_layers_that_are_handed_different_things_are_not_joined() -> None:
    """Of this model every second layer rotates nothing and keeps its modules."""
    model = random_model(family_config("exaone_moe"), seed=0)
    layers = decoder_layers(stacked_runner(model).model)
    assert not any(isinstance(layer, NativeStack | Done) for layer in layers)
    assert len(layers) == 4


def test_layers_between_which_a_model_does_something_stay_apart() -> None:
    """What the model adds behind its first layer, a stack would leave out."""
    model = tiny_model("llama")
    runner = runner_of(model)
    shapes, calls = list(runner.cache.shapes), calls_of(runner)
    fuse_layers(runner.model, shapes, runner.pool, calls)
    before = decoder_layers(runner.model)

    class Adding(FusedLayer):
        def forward(self, hidden_states: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            return super().forward(hidden_states + 1.0, *args, **kwargs)

    before[1].__class__ = Adding
    assert stack_cpu_layers(runner.model, shapes, runner.pool, calls) == 0
    assert decoder_layers(runner.model) == before


def test_what_does_not_fit_is_refused() -> None:
    llama, other = (fused_runner(random_model(tiny, seed=0)) for tiny in _configs())
    layers = [layer for runner in (llama, other) for layer in decoder_layers(runner.model)[:1]]
    parts = [(layer.attention, layer.feed_forward) for layer in layers]
    with pytest.raises(ValueError, match="no stack"):
        NativeLayerStack(parts)
    stack = NativeLayerStack(parts[:1])
    keys, values = llama.cache.layer(0)
    with pytest.raises(ValueError, match="keys"):
        stack.bind([LayerKv(keys[:, :, :-2].contiguous(), values)])
    with pytest.raises(TypeError, match="AttentionLayer cannot keep a tuple"):
        stack.bind([(keys, values)])
    with pytest.raises(ValueError, match="shorter"):
        stack.bind([])


def _configs() -> list[object]:
    from tests.support.models.tiny_models import tiny_config

    return [tiny_config("llama"), tiny_config("llama", hidden_size=128)]
