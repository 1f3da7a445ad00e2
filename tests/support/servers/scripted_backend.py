"""A backend that says what it is told to, for tests of what dialects make of answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent, TokenLogprobs
from ktransformers.errors import KTransformersError
from ktransformers.server.backend.base import GenerationRequest, ModelInfo
from tests.support.engines.fake_runner import byte_tokenizer
from tests.support.servers.fake_backend import FakeBackend

TEMPLATE = """\
{%- if tools %}<|im_start|>tools {{ tools | tojson }}<|im_end|>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if message.name %} name={{ message.name }}{% endif %}
{%- if message.tool_call_id %} of={{ message.tool_call_id }}{% endif %}
{%- if message.reasoning_content %} [{{ message.reasoning_content }}]{% endif %}
{{- '\n' + message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""
"""Shows everything that a conversation may hold. Has the marks of tool calls that make an answer's be looked for."""

TOKENIZER = byte_tokenizer(TEMPLATE)


@dataclass(frozen=True, slots=True)
class Script:
    """An answer of one token per piece. error: what it ends with instead of a reason."""

    pieces: Sequence[str]
    reason: FinishReason = FinishReason.STOP
    error: KTransformersError | None = None


class ScriptedBackend(FakeBackend):
    """Answers with its scripts, one after the other. requests: what it was asked; prompts: the same as text."""

    def __init__(self, *scripts: Script):
        super().__init__()
        self._scripts = list(scripts)
        self.requests: list[GenerationRequest] = []

    @property
    def prompts(self) -> list[str]:
        return [TOKENIZER.decode(request.prompt_ids, skip_special_tokens=False) for request in self.requests]

    @property
    def model(self) -> ModelInfo:
        ends = (TOKENIZER.eos_token_id,)
        return ModelInfo(
            TOKENIZER, 1 << 18, TOKENIZER.vocab_size, ends, SamplingParams(temperature=0), None, "scripted"
        )

    async def inference(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        script = self._scripts.pop(0)
        stats = GenerationStats(prompt_len=len(request.prompt_ids), cached_len=1)
        logprobs = None if request.params.logprobs is None else TokenLogprobs(-0.5, ((5, -0.5),))
        for index, piece in enumerate(script.pieces):
            stats.completion_len += 1
            is_last = index + 1 == len(script.pieces) and script.error is None
            is_cut = is_last and script.reason is not FinishReason.STOP
            yield TokenEvent(5, piece, stats, logprobs, script.reason if is_cut else None)
        if script.error is not None:
            raise script.error
        if script.reason is FinishReason.STOP:
            stats.completion_len += 1
            end = TOKENIZER.eos_token_id
            yield TokenEvent(end, "", stats, logprobs, FinishReason.STOP, end)
