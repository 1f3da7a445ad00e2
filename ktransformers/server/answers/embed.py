"""The way from a route to embeddings, which all dialects share. A prompt's embedding comes with its first token.

Each input is a generation of its own, of one token that nobody sees: the scheduler batches, chunks and resumes it as
any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
from fastapi import Request
from starlette.responses import Response

from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError, EngineError, UnsupportedError
from ktransformers.server.answers.fitting import in_words_of
from ktransformers.server.answers.generations import run_generations
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from ktransformers.server.bodies import body_size
from ktransformers.server.http.api_paths import USE_KEY
from ktransformers.server.service import Service, service_of
from ktransformers.server.streaming import unless_disconnected
from ktransformers.server.telemetry.request_log import note_request
from ktransformers.server.telemetry.request_metrics import RequestMetrics
from ktransformers.server.telemetry.traces import Answering, Operation

__all__ = ["Cut", "EmbeddingRequest", "Embeddings", "respond_embeddings", "shown_vector"]


@dataclass(frozen=True, slots=True)
class Cut:
    """Rule by which an input that is too long is cut: to `most` tokens, its last ones if `keeps_end`. most None: as
    many as the model takes.
    """

    most: int | None = None
    keeps_end: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequest:
    """A client's request for embeddings. inputs: texts, or their token ids. dimensions: how many of each vector's;
    None: all.

    cut: what becomes of an input that is too long; None: that is an error.
    """

    id: str
    model: str | None
    inputs: Sequence[str | Sequence[int]]
    dimensions: int | None = None
    cut: Cut | None = None
    priority: int = 0
    timeout: float | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The embeddings of a request's inputs. vectors: fp32, one per input. num_tokens: of all inputs. model: the name
    for the answer.
    """

    model: str
    vectors: Sequence[npt.NDArray[np.float32]]
    num_tokens: int


async def respond_embeddings(
    request: Request,
    num_inputs: int,
    read: Callable[[], EmbeddingRequest],
    render: Callable[[Embeddings], Response],
) -> Response:
    """Count a request for embeddings in, compute them, and return the response. read, errors: as in `respond`."""
    service, key = service_of(request), request.scope.get(USE_KEY)
    size = await body_size(request)
    service.admission.enter(service.backend.max_running, num_inputs, key)
    try:
        asked = read()
        if key is not None and service.backend.has_priorities:
            asked = replace(asked, priority=key.priority(asked.priority))
        with in_words_of(service, "input", has_answer=False):
            made = await service.workers.run(size, partial(_generations, service, asked))
        request_metrics = RequestMetrics(made, 1, service.metrics)
        name = service.check_model(asked.model)
        note_request(request, Answering(asked.id, request_metrics, Operation.EMBEDDINGS, name))

        async def work() -> Response:
            vectors = await _vectors(service, made, request_metrics)
            normalizes = service.model.embeddings.normalizes
            shown = [shown_vector(vector, asked.dimensions, normalizes) for vector in vectors]
            return render(Embeddings(name, shown, request_metrics.total.prompt_len))

        return await unless_disconnected(request, work())
    finally:
        service.admission.leave(num_inputs, key)


def _generations(service: Service, asked: EmbeddingRequest) -> list[GenerationRequest]:
    """One for each input, checked."""
    service.check_model(asked.model)
    model = service.model
    pooling = model.embeddings.pooling
    if pooling is None:
        raise UnsupportedError(
            "this model's files ask for embeddings that are made neither of the first token, nor the last, nor the mean"
        )
    params = SamplingParams(temperature=0.0, max_tokens=1, seed=0, pooling=pooling)
    made = []
    for index, one in enumerate(asked.inputs):
        generation = GenerationRequest(
            request_id=f"{asked.id}-{index}",
            prompt_ids=tuple(_prompt_ids(model, one, asked.cut)),
            params=params,
            priority=asked.priority,
            timeout=asked.timeout or service.config.request_timeout,
            timeline=service.new_timeline(),
        )
        service.backend.check(generation)
        made.append(generation)
    return made


def _prompt_ids(model: ModelInfo, one: str | Sequence[int], cut: Cut | None) -> Sequence[int]:
    if cut is None:
        return model.tokenizer.encode(one, max_len=model.max_len) if isinstance(one, str) else one
    ids: Sequence[int] = model.tokenizer.encode(one) if isinstance(one, str) else one
    most = model.max_len - 1 if cut.most is None else cut.most
    if len(ids) <= most:
        return ids
    if not cut.keeps_end:
        return ids[:most]
    before, after = _special_ends(model, one, ids) if isinstance(one, str) else (0, 0)
    if before + after >= most:
        return ids[len(ids) - most :]
    return [*ids[:before], *ids[len(ids) - most + before :]]  # what the tokenizer puts around texts stays


def _special_ends(model: ModelInfo, text: str, ids: Sequence[int]) -> tuple[int, int]:
    """How many tokens the tokenizer puts in front of a text, and behind it."""
    bare = model.tokenizer.encode(text, add_special_tokens=False)
    num_more = len(ids) - len(bare)
    before = next((at for at in range(num_more + 1) if list(ids[at : at + len(bare)]) == bare), 0)
    return before, max(num_more - before, 0)


async def _vectors(
    service: Service, made: Sequence[GenerationRequest], request_metrics: RequestMetrics
) -> list[npt.NDArray[np.float32]]:
    found: dict[int, bytes] = {}
    async with aclosing(run_generations(service.backend, made)) as events:
        async for index, event in events:
            request_metrics.note(index, event)
            if event.finish_reason is not None:
                request_metrics.finish_reasons[index] = event.finish_reason.value
            if event.embedding is not None:
                found[index] = event.embedding
    if len(found) < len(made):
        raise EngineError("the server is going down: not all embeddings were computed")
    return [np.frombuffer(found[index], "<f4") for index in range(len(made))]


def shown_vector(vector: npt.NDArray[np.float32], dimensions: int | None, normalizes: bool) -> npt.NDArray[np.float32]:
    """Return the vector's first `dimensions` numbers (None: all), scaled to length 1 if `normalizes`. Raises
    ConfigError for too many.
    """
    if dimensions is not None and dimensions > len(vector):
        raise ConfigError(f"dimensions {dimensions} are more than this model's embeddings have: {len(vector)}")
    cut = vector[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(cut)) if normalizes else 0.0
    return (cut / length if length else cut).astype(np.float32)
