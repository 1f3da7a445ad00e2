"""The route POST /v1/completions: text or token ids in, their continuation out.

https://platform.openai.com/docs/api-reference/completions. With `echo` the choice begins with its prompt, and with
`logprobs` too, the prompt's tokens have theirs: what evaluation harnesses score answers with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fastapi import APIRouter, Request
from starlette.responses import Response

from ktransformers.server.answers.events import AnswerFinished, AnswerStarted, AnswerStep, TextDelta, TokenAdded
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.requests import count_answers
from ktransformers.server.answers.respond import respond
from ktransformers.server.api.openai.fields import COMPLETION_FIELDS
from ktransformers.server.api.openai.logprobs import CompletionLogprobs
from ktransformers.server.api.openai.read import num_prompts, text_request
from ktransformers.server.api.openai.schemas import CompletionBody
from ktransformers.server.api.openai.writer import Fields, OpenAIWriter
from ktransformers.server.bodies import body_route

__all__ = ["router"]

router = APIRouter(route_class=body_route(COMPLETION_FIELDS))


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Answer with the continuation of one or more prompts, as one JSON object or as a stream of server-sent events."""
    return await respond(
        request,
        count_answers(num_prompts(body), body.num_computed),
        bool(body.stream),
        lambda: text_request(body),
        lambda prepared: _TextWriter(prepared, body),
    )


@dataclass(slots=True)
class _Piece:
    """What became of a choice since the last piece."""

    logprobs: CompletionLogprobs | None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    sum_logprobs: float = 0.0
    num_scored: int = 0

    @property
    def mean_logprob(self) -> float:
        """Mean log probability of the answer's tokens."""
        return self.sum_logprobs / max(self.num_scored, 1)


class _TextWriter(OpenAIWriter):
    kind = chunk_kind = "text_completion"

    def __init__(self, prepared: PreparedRequest, body: CompletionBody):
        super().__init__(prepared, body)
        has_logprobs, self._has_ids = body.logprobs is not None, bool(body.return_token_ids)
        self._n, self._num_computed = body.n or 1, body.num_computed
        self._pieces = [
            _Piece(CompletionLogprobs(prepared.tokenizer) if has_logprobs else None) for _ in prepared.requests
        ]

    def keep(self, step: AnswerStep) -> None:
        piece = self._pieces[step.index]
        for event in step.events:
            match event:
                case AnswerStarted(_, prompt_text, prompt_logprobs):
                    piece.text += prompt_text
                    if piece.logprobs is not None and prompt_logprobs is not None:
                        for token_id, logprobs in zip(
                            self.prepared.requests[step.index].prompt_ids, prompt_logprobs, strict=True
                        ):
                            piece.logprobs.add(token_id, logprobs)
                case TokenAdded(token_id, logprobs, is_end):
                    piece.token_ids.append(token_id)
                    if logprobs is not None and not is_end:
                        piece.sum_logprobs += logprobs.logprob
                        piece.num_scored += 1
                    if piece.logprobs is not None and not is_end:
                        piece.logprobs.add(token_id, logprobs)
                case TextDelta(text):
                    piece.text += text
                case AnswerFinished(reason):
                    piece.finish_reason = reason

    def _chunk_choices(self, step: AnswerStep) -> Iterator[Fields]:
        self.keep(step)
        choice = self._take(step.index)
        is_empty = not choice["text"] and choice["logprobs"] is None and choice["finish_reason"] is None
        if not is_empty or self._has_ids or self._shows_tokens:
            yield choice

    def _choices(self) -> list[Fields]:
        return [self._take(place) | {"index": index} for index, place in enumerate(self._best())]

    def _best(self) -> list[int]:
        """Which answers come back: with best_of, of each prompt the n likeliest, best first."""
        places = range(len(self._pieces))
        if self._num_computed == self._n:
            return list(places)
        best: list[int] = []
        for first in places[:: self._num_computed]:
            ranked = sorted(places[first : first + self._num_computed], key=lambda i: -self._pieces[i].mean_logprob)
            best += ranked[: self._n]
        return best

    def _take(self, index: int) -> Fields:
        """An element of choices: what was kept since the last call."""
        piece = self._pieces[index]
        self._pieces[index] = _Piece(piece.logprobs)
        logprobs = None if piece.logprobs is None else piece.logprobs.take()
        choice = {
            "index": index,
            "text": piece.text,
            "logprobs": logprobs if logprobs is not None and logprobs["tokens"] else None,
            "finish_reason": piece.finish_reason,
        }
        return choice | {"token_ids": piece.token_ids} if self._has_ids else choice
