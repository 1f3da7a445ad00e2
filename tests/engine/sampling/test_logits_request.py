"""What comes back of logits on a GPU changes no token: == with the sampler on whole rows, ties and errors included.

The GPU is made up (tests/support/engines/fake_gpus.py): kernels run in Triton's interpreter.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams
from ktransformers.engine.load.builder import Engine, build_engine
from ktransformers.engine.sampling.logits_request import BEST_TOKEN, MAX_TOP_K, WHOLE_ROW, RequestedLogits
from ktransformers.engine.sampling.sampler import RequestSampler, SampledToken, sample_batch, sample_each
from ktransformers.engine.step.logits_fetch import LogitsFetch
from ktransformers.errors import KTransformersError
from ktransformers.kernels.triton.common import candidates
from tests.support.engines.fake_gpus import fake_hardware
from tests.support.engines.one_sequence import static_engine
from tests.support.engines.paged_loop import PagedLoop, scheduler_config
from tests.support.engines.sequential import Session
from tests.support.models.tiny_models import tiny_model, write_safetensors

pytest.importorskip("triton")

GPU = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = ("normal", "rounded", "whole", "equal", "peaked", "one", "clustered")


def make_row(kind: str, vocab: int, generator: torch.Generator) -> Tensor:
    row = torch.randn(vocab, generator=generator) * 3
    if kind == "rounded":
        row = (row / 8).bfloat16().float()  # as LM heads leave them, with many ties
    elif kind == "whole":
        row = row.round()
    elif kind == "equal":
        row = torch.full((vocab,), -0.0)
    elif kind == "peaked":
        row[torch.randint(vocab, (5,), generator=generator)] += 20
    elif kind == "one":
        row -= 1000
        row[-1] = 1000.0
    elif kind == "clustered":
        row[vocab // 3 : vocab // 3 + 150] += 12
    return row


def draw_params(rng: random.Random) -> SamplingParams:
    """Half of them as requests are, the others at the ends of what is allowed."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.6, 1.0, 1e-6, 1e-300, 50.0, 1e300]),
        top_k=rng.choice([1, 2, 20, 40, 50, 64, 64, 65, 1000, 0, -1]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.8, 0.3, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        seed=rng.randrange(10**6),
    )


def outcome(result: SampledToken | KTransformersError) -> object:
    return str(result) if isinstance(result, KTransformersError) else result


def compare(logits: Tensor, samplers: list[RequestSampler], fetch: LogitsFetch) -> RequestedLogits | Tensor:
    """Tokens of both ways at a few positions; what the second came from."""
    found = fetch.requested(logits.to(GPU), [sampler.logits_request for sampler in samplers])
    for position in (0, 5, 77, 4096):
        positions = [position + i for i in range(len(samplers))]
        wanted = [outcome(one) for one in sample_each(logits, samplers, positions)]
        assert [outcome(one) for one in sample_each(found, samplers, positions)] == wanted
    return found


@pytest.mark.every(5)
@pytest.mark.parametrize("vocab", [1, 70, 3001])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_whole_rows(kind: str, vocab: int) -> None:
    rng, generator = random.Random(f"{kind} {vocab}"), torch.Generator().manual_seed(vocab)
    logits = torch.stack([make_row(kind, vocab, generator) for _ in range(16)])
    samplers = [RequestSampler(draw_params(rng), [], vocab) for _ in range(16)]
    found = compare(logits, samplers, LogitsFetch(17, vocab, GPU))
    assert isinstance(found, RequestedLogits)
    if kind == "normal":
        assert len(found.whole) == sum(sampler.logits_request == WHOLE_ROW for sampler in samplers)


@pytest.mark.parametrize("vocab", [7, 300])
def test_rows_that_are_not_finite_have_the_errors_of_whole_rows(vocab: int) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(1))
    for row, bad in ((1, "nan"), (2, "inf"), (3, "-inf"), (5, "nan"), (6, "-inf")):
        logits[row, vocab - 1 - row] = float(bad)
    greedy, some = SamplingParams(temperature=0), SamplingParams(temperature=1, top_k=3, seed=1)
    for params in ([greedy] * 8, [some] * 8, [greedy, some] * 4):
        samplers = [RequestSampler(one, [], vocab) for one in params]
        found = compare(logits, samplers, LogitsFetch(8, vocab, GPU))
        assert isinstance(found, RequestedLogits)
        assert [row for row, place in enumerate(found.places) if place >= 0] == [1, 2, 3, 5, 6]
    with pytest.raises(KTransformersError, match="computed nan as the logit"):
        sample_batch(found, samplers, range(8))


class Anything:
    """A mask that allows all."""

    def commit(self, token_id: int) -> None:
        """Nothing depends on it."""

    def begin(self) -> None:
        """Nothing takes time."""

    def allowed(self) -> None:
        return None


def test_needs() -> None:
    def need(mask: Anything | None = None, prompt: tuple[int, ...] = (), **fields: object) -> int:
        params = SamplingParams(**fields)  # type: ignore[arg-type]
        return RequestSampler(params, prompt, 100, mask, eos_token_ids=(7,)).logits_request

    greedy = {"temperature": 0.0}
    assert need(**greedy) == need(**greedy, top_k=5, top_p=0.5) == BEST_TOKEN
    assert need(top_k=20, top_p=0.95, min_p=0.1) == 20
    assert need(top_k=MAX_TOP_K) == MAX_TOP_K
    for fields in ({}, {"top_k": MAX_TOP_K + 1}, {"top_k": -1}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert need(**fields) == WHOLE_ROW  # type: ignore[arg-type]
    others = ({"logprobs": 0}, {"logit_bias": {3: 1.0}}, {"allowed_token_ids": [3]}, {"min_tokens": 2})
    for base, more in itertools.product((greedy, {"top_k": 5}), others):
        assert need(**base, **more) == WHOLE_ROW
    assert need(Anything(), **greedy) == WHOLE_ROW
    assert need(None, (1, 2), **greedy, repetition_penalty=1.1) == WHOLE_ROW


def test_needs_change_with_the_answer() -> None:
    held = RequestSampler(SamplingParams(temperature=0, min_tokens=2), [], 100, eos_token_ids=(7,))
    counted = RequestSampler(SamplingParams(temperature=0, presence_penalty=1.0), [], 100)
    seen = []
    for token_id in (1, 2, 3):
        seen.append((held.logits_request, counted.logits_request))
        held.commit(token_id)
        counted.commit(token_id)
    assert seen == [(WHOLE_ROW, BEST_TOKEN), (WHOLE_ROW, WHOLE_ROW), (BEST_TOKEN, WHOLE_ROW)]


def test_steps_of_all_kinds_of_requests() -> None:
    """Rows that need all their logits come as they are, in any order, beside the others."""
    vocab, rng, generator = 500, random.Random(2), torch.Generator().manual_seed(2)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(top_k=20, seed=1),
        SamplingParams(temperature=0, logprobs=3),
        SamplingParams(top_k=5, logit_bias={9: 4.0}, seed=3),
        SamplingParams(top_p=0.9, seed=4),
        SamplingParams(temperature=0, repetition_penalty=1.3),
    ]
    fetch = LogitsFetch(12, vocab, GPU)
    for _ in range(8):
        params = [rng.choice(kinds) for _ in range(rng.randint(1, 12))]
        logits = torch.randn(len(params), vocab, generator=generator) * 4
        compare(logits, [RequestSampler(one, [1, 2, 3], vocab) for one in params], fetch)


def test_rows_of_a_step_can_be_left_out() -> None:
    logits = torch.randn(5, 100, generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=0), SamplingParams(top_k=4, seed=1), SamplingParams(seed=2)]
    samplers = [RequestSampler(params[i % 3], [], 100) for i in range(5)]
    found = LogitsFetch(5, 100, GPU).requested(logits.to(GPU), [sampler.logits_request for sampler in samplers])
    assert isinstance(found, RequestedLogits)
    for wanted in ([0, 1, 2, 3, 4], [0, 2, 4], [1], [2], [3, 4], []):
        some = [samplers[i] for i in wanted]
        assert sample_batch(found.rows(wanted), some, wanted) == sample_batch(logits[wanted], some, wanted)
    with pytest.raises(ValueError, match="5 rows do not fit"):
        sample_batch(found, samplers[:4], range(4))


def test_a_vocabulary_that_is_too_large_comes_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ktransformers.engine.step.logits_fetch.MAX_VOCAB", 99)
    logits = torch.randn(2, 100)
    assert torch.equal(LogitsFetch(2, 100, GPU).requested(logits.to(GPU), [BEST_TOKEN, 3]), logits)  # type: ignore[arg-type]


class Copied:
    """Counts rows of logits that leave the GPU, and launches of both kernels."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.num_rows = self.num_best = self.num_candidates = 0
        whole, take = LogitsFetch.whole, LogitsFetch._take
        best, few = candidates.BestTokens.find_best, candidates.BestTokens.find_candidates

        def counted_whole(fetch: LogitsFetch, logits: Tensor) -> Tensor:
            self.num_rows += len(logits)
            return whole(fetch, logits)

        def counted_take(fetch: LogitsFetch, logits: Tensor, rows: list[int], *rest: object) -> None:
            self.num_rows += len(rows)
            take(fetch, logits, rows, *rest)  # type: ignore[arg-type]

        def counted_best(tools: candidates.BestTokens, logits: Tensor) -> Tensor:
            self.num_best += 1
            return best(tools, logits)

        def counted_few(tools: candidates.BestTokens, logits: Tensor, top: int) -> Tensor:
            self.num_candidates += 1
            return few(tools, logits, top)

        monkeypatch.setattr(LogitsFetch, "whole", counted_whole)
        monkeypatch.setattr(LogitsFetch, "_take", counted_take)
        monkeypatch.setattr(candidates.BestTokens, "find_best", counted_best)
        monkeypatch.setattr(candidates.BestTokens, "find_candidates", counted_few)


GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
TOP_K = SamplingParams(temperature=0.8, top_k=20, top_p=0.95, seed=5, max_tokens=3, ignore_eos=True)
TOP_P = SamplingParams(temperature=0.8, top_p=0.95, seed=6, max_tokens=3, ignore_eos=True)
PROMPTS = [[(5 * i + at) % 90 for i in range(3 + at)] for at in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    write_safetensors(tiny_model("llama", seed=1, layers=1), path)
    return path


@pytest.fixture(scope="module")
def paged(model: Path) -> Engine:
    config = EngineConfig(model_path=model, cache_lens=64, cpu_infer=1, self_check=False)
    return build_engine(config, page_size=16, max_batch_size=3, hardware=fake_hardware())


def answers(paged: Engine, params: list[SamplingParams]) -> list[list[int | None]]:
    loop = PagedLoop(scheduler_config(paged, max_batch_size=3), lambda: paged.executor)
    paged.executor.reset()
    names = [loop.add(prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    loop.drain()
    return [list(loop.answers[name].token_ids) for name in names]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "params",
    [[GREEDY] * 3, [TOP_P, GREEDY, TOP_K]],
    ids=["greedy", "mixed"],
)
def test_decode_steps_of_an_engine(
    params: list[SamplingParams], paged: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps in which no request needs whole rows copy none; tokens are the same as when all rows are copied."""
    with monkeypatch.context() as patched:
        patched.setattr(RequestSampler, "logits_request", WHOLE_ROW)
        wanted = answers(paged, params)
    copied = Copied(monkeypatch)
    assert answers(paged, params) == wanted
    num_decodes = GREEDY.max_tokens - 1  # the prompts are a step of many rows, which copies all that it keeps
    assert copied.num_rows == num_decodes * sum(one is TOP_P for one in params)
    assert bool(copied.num_best) == (params == [GREEDY] * 3)
    assert bool(copied.num_candidates) == (TOP_K in params)


@pytest.mark.parametrize("params", [GREEDY, TOP_K], ids=["greedy", "top_k"])
def test_one_sequence(params: SamplingParams, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model_path=model, cache_lens=64, cpu_infer=1, self_check=False)
    engine = static_engine(config, hardware=fake_hardware())

    def run() -> list[int | None]:
        session = Session(engine.runner, chunk_size=16)
        return [event.token_id for event in session.generate(PROMPTS[2], params)]

    with monkeypatch.context() as patched:
        patched.setattr(RequestSampler, "logits_request", WHOLE_ROW)
        wanted = run()
    copied = Copied(monkeypatch)
    assert run() == wanted
    assert copied.num_rows == 0
    assert (copied.num_best, copied.num_candidates) == ((2, 0) if params is GREEDY else (0, 2))
    assert run() == wanted  # after an answer that is in the cache
