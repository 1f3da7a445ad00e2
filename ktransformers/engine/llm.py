"""The offline API: `LLM(model_path=..., gguf_path=...).generate(prompts, SamplingParams(...))`.

Answers one prompt after the other on one static cache, reusing what a prompt shares with the one before it. Does not
know HTTP or terminals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypedDict, Unpack, cast

from ktransformers.config import EngineConfig
from ktransformers.core import FinishReason, GenerationStats, SamplingParams, TokenEvent, TokenLogprobs
from ktransformers.engine.sampler import draw_seed
from ktransformers.engine.session import Session
from ktransformers.errors import ConfigError
from ktransformers.tokenizer.tokenizer import Message, Tokenizer

if TYPE_CHECKING:
    from ktransformers.engine.builder import Engine

__all__ = ["LLM", "EngineOptions", "Prompt", "RequestOutput", "default_sampling_params"]

Prompt = str | Sequence[int]
"""Text, or token ids."""


class EngineOptions(TypedDict, total=False):
    """The fields of EngineConfig besides the two paths to the model."""

    optimize_config_path: Path | None
    cache_lens: int
    chunk_size: int
    max_new_tokens: int
    cpu_infer: int
    cpu_quant: str | None
    cpu_prefill: str
    gpu_memory: float
    use_cuda: bool | None
    use_cuda_graph: bool | None
    attention_backend: str
    strict: bool
    trust_remote_code: bool


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One answer. token_ids include the end token; text does not. params is what was used, its seed filled in.

    logprobs has one entry per token when params.logprobs is set, else it is None; prompt_logprobs the same for the
    prompt, None for its first token.
    """

    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None
    stats: GenerationStats
    params: SamplingParams
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


def default_sampling_params(generation_defaults: Mapping[str, Any], max_tokens: int | None) -> SamplingParams:
    """What a model's generation config asks for, as `transformers` reads it: greedy unless it says otherwise."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation_defaults[name] for name in names if generation_defaults.get(name) is not None}
    if not generation_defaults.get("do_sample", "temperature" in given):
        return SamplingParams(
            temperature=0.0, repetition_penalty=given.get("repetition_penalty", 1.0), max_tokens=max_tokens
        )
    return SamplingParams(max_tokens=max_tokens, **given)


class LLM:
    """One loaded model. Loading happens in the constructor; its errors are those of `build_engine`."""

    def __init__(
        self,
        model_path: str | Path | None = None,
        gguf_path: str | Path | None = None,
        *,
        progress: Callable[..., None] | None = None,
        **options: Unpack[EngineOptions],
    ):
        """progress: called while weights load, as `build_engine` describes. options: see EngineConfig."""
        from ktransformers.engine.builder import build_engine  # late: it imports every operator and kernel

        config = EngineConfig(
            model_path=None if model_path is None else Path(model_path),
            gguf_path=None if gguf_path is None else Path(gguf_path),
            **options,
        )
        self._set_engine(build_engine(config, progress))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """The API over an engine that is already built."""
        llm = cls.__new__(cls)
        llm._set_engine(engine)
        return llm

    def _set_engine(self, engine: Engine) -> None:
        self.engine = engine
        self._tokenizer = engine.tokenizer or Tokenizer(None)
        self.session = Session(
            engine.runner,
            chunk_size=engine.config.chunk_size,
            eos_token_ids=engine.eos_token_ids,
            tokenizer=self._tokenizer,
        )

    def close(self) -> None:
        """Stop the worker threads. The object cannot be used afterwards; a `with` block closes it at its end."""
        self.session.clear()
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; one without vocabulary when the model's files hold none."""
        return self._tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What is used when a call names no sampling parameters: the model's own, up to --max_new_tokens tokens."""
        return default_sampling_params(self.engine.generation_defaults, self.engine.config.max_new_tokens)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
    ) -> Iterator[TokenEvent]:
        """The answer to one prompt, token by token. Raises ConfigError and ContextLengthError before any work.

        on_prefill: told before every chunk of the prompt how many tokens are computed, and how many have to be.
        """
        params = sampling_params or self.default_params
        return self.session.generate(self._prompt_ids(prompt), params, should_stop, on_prefill)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The answers to one or more prompts, in order. sampling_params: for all of them, or one per prompt."""
        is_one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        each = [cast(Prompt, prompts)] if is_one else cast(Sequence[Prompt], prompts)
        params = self._params_of(sampling_params, len(each))
        all_ids = [self._prompt_ids(prompt) for prompt in each]
        return [self._answer(ids, one) for ids, one in zip(all_ids, params, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of several, through the model's chat template."""
        if not messages:
            raise ConfigError("a conversation needs at least one message")
        is_one = isinstance(messages[0], Mapping)
        conversations = [cast(Sequence[Message], messages)] if is_one else cast(Sequence[Sequence[Message]], messages)
        prompts = [self.tokenizer.apply_chat_template(turn, tools, **template_kwargs) for turn in conversations]
        params = self._params_of(sampling_params, len(prompts))
        return [self._answer(ids, one) for ids, one in zip(prompts, params, strict=True)]

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token_id) for token_id in prompt]

    def _params_of(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or self.default_params] * count
        if len(given) != count:
            raise ConfigError(f"{len(given)} sampling parameters for {count} prompts; give one, or one per prompt")
        return list(given)

    def _answer(self, prompt_ids: list[int], params: SamplingParams) -> RequestOutput:
        if params.seed is None:
            params = replace(params, seed=draw_seed())
        events = list(self.session.generate(prompt_ids, params))
        reason = events[-1].finish_reason
        assert reason is not None
        logprobs = tuple(event.logprobs for event in events if event.logprobs is not None)
        return RequestOutput(
            prompt_token_ids=tuple(prompt_ids),
            token_ids=tuple(event.token_id for event in events if event.token_id is not None),
            text="".join(event.text for event in events),
            finish_reason=reason,
            logprobs=None if params.logprobs is None else logprobs,
            stats=events[-1].stats,
            params=params,
            prompt_logprobs=events[0].prompt_logprobs,
        )
