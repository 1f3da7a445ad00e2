"""Writes the response object, whole or as a stream of numbered events, and keeps it for later requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ktransformers.core import GenerationStats
from ktransformers.errors import KTransformersError
from ktransformers.server.answers.events import AnswerReason, AnswerStep, TokenAdded
from ktransformers.server.answers.prepared_request import PreparedRequest
from ktransformers.server.answers.respond import Writer
from ktransformers.server.api.openai.logprobs import chat_logprobs
from ktransformers.server.api.openai.responses.output import Fields, Output, OutputOptions
from ktransformers.server.api.openai.responses.read import Exchange
from ktransformers.server.api.openai.responses.store import KeptResponse, Turn
from ktransformers.server.api.openai.writer import drafts_of, image_tokens_of
from ktransformers.server.responses import error_body, json_bytes

__all__ = ["ResponsesWriter"]


def _shown_format(form: Fields) -> Fields:
    """With a name, which clients expect beside a schema."""
    return {"name": "answer"} | form if form["type"] == "json_schema" else form


class ResponsesWriter(Writer):
    """Writes answers of /v1/responses. keep_response: is given what later requests may refer to, once the answer is
    complete.
    """

    def __init__(
        self, prepared: PreparedRequest, exchange: Exchange, keep_response: Callable[[KeptResponse], None] | None
    ):
        self._prepared, self._exchange, self._keep_response = prepared, exchange, keep_response
        body = exchange.body
        self._output = Output(
            OutputOptions(
                answer_id=prepared.id,
                callables=exchange.tools.callables,
                has_summary=body.summary is not None,
                has_sealed=exchange.wants_sealed,
                max_calls=1 if body.parallel_tool_calls is False else None,
                logprobs=self._logprobs if exchange.wants_logprobs else None,
            )
        )
        self._num_sent = 0

    def _logprobs(self, token: TokenAdded) -> Fields | None:
        if token.logprobs is None or token.is_end:
            return None
        return chat_logprobs(self._prepared.tokenizer, token.token_id, token.logprobs)

    # As a stream.

    def begin(self) -> Iterator[bytes]:
        """Yield the events that open the stream."""
        for type in ("response.created", "response.in_progress"):
            yield self._sent({"type": type, "response": self._response("in_progress")})

    def write(self, step: AnswerStep) -> Iterator[bytes]:
        """Yield the stream's events for this step."""
        for event in step.events:
            for made in self._output.feed(event):
                yield self._sent(made)

    def end(self, error: KTransformersError | None) -> Iterator[bytes]:
        """Yield the events that end the stream. An error is sent twice, since some clients look for one of the two
        only.
        """
        if error is None:
            response = self._finished()
            yield self._sent({"type": f"response.{response['status']}", "response": response})
            return
        said = error_body(error)["error"]
        yield self._sent({"type": "error", "code": said["code"], "message": said["message"], "param": said["param"]})
        failed = self._response("failed") | {"error": {"code": "server_error", "message": said["message"]}}
        yield self._sent({"type": "response.failed", "response": failed})

    def _sent(self, event: Fields) -> bytes:
        """One event of the stream."""
        numbered = event | {"sequence_number": self._num_sent}
        self._num_sent += 1
        return b"event: " + str(event["type"]).encode() + b"\ndata: " + json_bytes(numbered) + b"\n\n"

    # As one body.

    def keep(self, step: AnswerStep) -> None:
        """Add a step of an answer that is sent as one body."""
        for event in step.events:
            for _ in self._output.feed(event):
                pass

    def body(self) -> Fields:
        """Return the response object of a whole answer."""
        return self._finished()

    # The object.

    def _finished(self) -> Fields:
        finished = self._output.finished
        reason = AnswerReason.ABORT if finished is None else finished.reason
        if reason is AnswerReason.ABORT:
            said = "the server was stopped in the middle of this answer"
            return self._response("failed") | {"error": {"code": "server_error", "message": said}}
        if reason is AnswerReason.LENGTH:
            response = self._response("incomplete") | {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            response = self._response("completed") | {"completed_at": int(time.time())}
        if self._keep_response is not None:
            kept = KeptResponse(
                self._exchange.id, json_bytes(response), self._exchange.context, Turn.of(self._output.items)
            )
            self._keep_response(kept)
        return response

    def _response(self, status: str) -> Fields:
        body, params = self._exchange.body, self._prepared.requests[0].params
        is_running = status == "in_progress"
        effort = None if body.reasoning is None else body.reasoning.effort
        text: Fields = {"format": _shown_format(body.text_format)}
        if body.text is not None and body.text.verbosity is not None:
            text["verbosity"] = body.text.verbosity
        return {
            "id": self._exchange.id,
            "object": "response",
            "created_at": self._prepared.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "model": self._prepared.model,
            "output": [] if is_running else self._output.items,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": {"effort": effort, "summary": body.summary},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": self._keep_response is not None,
            "temperature": params.temperature,
            "text": text,
            "tool_choice": body.tool_choice or "auto",
            "tools": self._exchange.tools.echoed,
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None if is_running else self._usage(self._prepared.usage()),
            "user": body.user,
            "metadata": body.metadata or {},
        }

    def _usage(self, stats: GenerationStats) -> Fields:
        return {
            "input_tokens": stats.prompt_len,
            "input_tokens_details": {
                "cached_tokens": stats.cached_len,
                "cache_write_tokens": 0,
                **image_tokens_of(self._prepared),
            },
            "output_tokens": stats.completion_len,
            "output_tokens_details": {
                "reasoning_tokens": self._output.num_reasoning_tokens,
                **drafts_of(stats),
            },
            "total_tokens": stats.prompt_len + stats.completion_len,
        }
