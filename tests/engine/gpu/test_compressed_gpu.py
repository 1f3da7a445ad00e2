"""Attention over compressed keys, hyper-connections and routers that look up the token, on made-up GPUs in fp32.

Logits and greedy tokens are those of `transformers`; decode steps are replayed.
"""

from __future__ import annotations

import copy
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import build_engine
from ktransformers.errors import UnsupportedError
from ktransformers.operators.attention.compressed import KCompressedAttention
from ktransformers.operators.experts.routed import KTransformersExperts
from ktransformers.operators.layers.hyper import KHyperConnection
from ktransformers.system.shipped_rules import shipped_path
from tests.support.engines.fake_gpus import FakeGraphs, fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.runners import random_ids
from tests.support.models.agreement import TOLERANCE
from tests.support.models.fp8_models import write_published
from tests.support.models.tiny_models import WINDOW, tiny_model, write_safetensors

pytest.importorskip("triton")

CHUNKS = [(0, 37), (37, 42), (42, 49), (49, 50), (50, 51)]  # three windows; 12 entries, of which 4 are chosen
PAGE = 8
NARROW = 1e-2
"""Where products round what they multiply: to fp16 in the interpreter (2^-11), a dozen of them one after another."""
PLACES: dict[str, tuple[str, dict[str, object], float]] = {
    "experts-in-vram": ("bf16", {}, NARROW),
    "experts-on-cpu": ("fp32", {"optimize_config_path": shipped_path("DeepSeek-V4.yaml")}, TOLERANCE),
    "two-gpus": ("fp32", {"spread_layers": True}, TOLERANCE),  # experts of fp32 stay on the CPU
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """Its weights are the same in bf16."""
    made = tiny_model("deepseek_v4", seed=3, layers=3, hc_sinkhorn_iters=3)
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return made


@pytest.fixture(scope="module")
def folders(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same numbers in two types."""
    return {
        name: write_safetensors(copy.deepcopy(model).to(dtype), tmp_path_factory.mktemp(name))
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "place",
    ["experts-in-vram", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("experts-on-cpu", "two-gpus"))],
)
def test_chunks_and_replayed_steps_agree_with_transformers(
    model: PreTrainedModel, folders: dict[str, Path], place: str
) -> None:
    dtype, settings, tolerance = PLACES[place]
    ids, graphs = random_ids(model.config.vocab_size, CHUNKS[-1][1]), FakeGraphs()
    assert len(ids) > 3 * WINDOW
    config = EngineConfig(model_path=folders[dtype], cache_lens=54, cpu_infer=1, **settings)  # type: ignore[arg-type]
    num_gpus = 2 if place == "two-gpus" else 1
    with closing(static_engine(config, hardware=fake_hardware(num_gpus, graphs=graphs))) as engine:
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
        modules = list(engine.runner.model.modules())
        layer_devices = {layer_device.device for layer_device in engine.plan.layer_devices}
    assert layer_devices == {f"cuda:{i}" for i in range(num_gpus)}
    assert graphs.replays == 2
    assert sum(isinstance(m, KCompressedAttention) and m.device.is_gpu for m in modules) == 3
    assert sum(isinstance(m, KHyperConnection) and m.spec is not None for m in modules) == 6
    experts = {m.placement.generate_device for m in modules if isinstance(m, KTransformersExperts)}
    assert experts == (layer_devices if place == "experts-in-vram" else {"cpu"})
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    assert (got - want).abs().max() <= tolerance * want.abs().max()


@pytest.mark.exhaustive
def test_sequences_in_one_batch_and_preempted(model: PreTrainedModel, folders: dict[str, Path]) -> None:
    """There are pages for the prompts and no more; steps are replayed side by side."""
    graphs, lengths = FakeGraphs(), (15, 14, 6)
    config = EngineConfig(model_path=folders["fp32"], cache_lens=5 * PAGE, cpu_infer=1)
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0)
    prompts = [random_ids(model.config.vocab_size, length, seed=length) for length in lengths]
    hardware = fake_hardware(graphs=graphs)
    with closing(build_engine(config, page_size=PAGE, max_batch_size=3, hardware=hardware)) as paged:
        loop = PagedLoop(scheduler_config(paged, chunk_size=64, has_prefix_cache=False), lambda: paged.executor)
        names = [loop.add(prompt, params) for prompt in prompts]
        loop.drain()
        assert loop.scheduler.stats().num_preemptions > 0
    assert graphs.replays > 0
    for name, prompt in zip(names, prompts, strict=True):
        answer = loop.answers[name].token_ids
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert answer == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.exhaustive
@pytest.mark.parametrize("block", [(128, 128), (32, 32)])
def test_published_formats(block: tuple[int, int], tmp_path: Path) -> None:
    """FP4 experts and FP8 matrices are multiplied as they are stored, and the rest in bf16."""
    model = tiny_model("deepseek_v4", seed=3, layers=3, hidden=256, hc_sinkhorn_iters=3, index_topk=11)
    write_published(model, tmp_path, block)
    ids = random_ids(model.config.vocab_size, CHUNKS[-1][1])
    config = EngineConfig(model_path=tmp_path, cache_lens=54, cpu_infer=1)
    with closing(static_engine(config, hardware=fake_hardware(graphs=FakeGraphs()))) as engine:
        got = torch.cat([engine.runner.forward(ids[a:b], a, range(b - a)).clone() for a, b in CHUNKS])
        types = {e.key.rpartition(".")[2]: (set(e.quant_types), set(e.nbytes)) for e in engine.plan.entries}
    assert types["experts"] == ({"MXFP4"}, {"cuda:0"})
    assert types["q_b_proj"] == ({"F8_E4M3" if block == (128, 128) else "MXFP8"}, {"cuda:0"})
    with torch.no_grad():
        want = model(torch.tensor([ids])).logits[0]
    errors = (got - want).norm(dim=-1) / want.norm(dim=-1)
    assert errors.median() <= NARROW


def test_pages_that_are_not_made_of_entries_are_refused(folders: dict[str, Path]) -> None:
    config = EngineConfig(model_path=folders["fp32"], cache_lens=60, cpu_infer=1)
    with pytest.raises(UnsupportedError, match="pages of 6 tokens are not made of entries of 4: change --page_size"):
        build_engine(config, page_size=6, max_batch_size=2, hardware=fake_hardware()).close()
