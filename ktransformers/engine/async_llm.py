"""The offline API for asyncio: answers as asynchronous streams, computed together on the model's own thread.

Nothing here blocks the event loop: loading, tokenizing and closing run on other threads, events come through queues.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, Unpack

from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.batch_loop import BatchLoop, Question
from ktransformers.engine.llm import describe_batches, load_batches, prompt_reader
from ktransformers.engine.llm_options import EngineOptions, LLMOptions, llm_options
from ktransformers.engine.outputs import (
    Conversation,
    Prompt,
    PromptReader,
    RequestOutput,
    collect_output,
)
from ktransformers.errors import EngineError
from ktransformers.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from ktransformers.engine.builder import PagedEngine

__all__ = ["AsyncAnswer", "AsyncLLM"]

_CLOSED = "this AsyncLLM is closed: make a new one, or stay inside the `async with` block for as long as it is used"


@dataclass(slots=True)
class _Asked:
    """What an answer is to; the ids and the parameters with their seed are known once it has begun."""

    read: Callable[[PromptReader], list[int]]
    given: SamplingParams | None
    request_id: str | None = None
    prompt_ids: list[int] = field(default_factory=list)
    params: SamplingParams | None = None


class AsyncAnswer:
    """One answer. `async for event in answer` gives its events as they come, `await answer` the whole of it.

    It begins when it is first waited for. Leaving the loop, `aclose`, or cancelling the task ends it and frees its
    pages. Only one of the two ways, and only once.
    """

    def __init__(self, events: AsyncGenerator[TokenEvent, None], asked: _Asked):
        self._events, self._asked = events, asked

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._events

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._whole().__await__()

    async def _whole(self) -> RequestOutput:
        events = [event async for event in self._events]
        if not events or self._asked.params is None:
            raise EngineError("this answer has been read already, or was closed: ask again")
        return collect_output(self._asked.prompt_ids, self._asked.params, events)

    async def aclose(self) -> None:
        """End the answer, if it is not over. Safe to call twice."""
        await self._events.aclose()


@dataclass(frozen=True, slots=True)
class _Loaded:
    batches: BatchLoop
    reader: PromptReader


class AsyncLLM:
    """One model for many concurrent tasks of one event loop. `async with AsyncLLM() as llm:` loads and closes it.

    Without the block, the model is loaded by `start` or by the first answer, and `aclose` closes it. The tokens of an
    answer are those that LLM gives. Errors are those of LLM; an answer raises them where it is waited for.
    """

    _loaded: _Loaded | None = None
    _is_closed = False
    _given_up: threading.Event | None = None  # tells the present loading to end
    _finalizer: weakref.finalize[[], AsyncLLM] | None = None

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        gguf_path: str | os.PathLike[str] | None = None,
        *,
        model_path: str | os.PathLike[str] | None = None,
        progress: Callable[..., None] | None = None,
        **options: Unpack[EngineOptions],
    ):
        """See LLM. Checks the keywords and loads nothing yet. progress is called on another thread."""
        self._options: LLMOptions | None = llm_options(model, gguf_path, model_path, options)
        self._progress = progress
        self._starting = asyncio.Lock()

    @classmethod
    def from_engine(cls, engine: PagedEngine, max_batch_size: int = 16) -> AsyncLLM:
        """The API over an engine that is already built, for up to max_batch_size sequences at once."""
        llm = cls.__new__(cls)
        llm._options, llm._progress, llm._starting = None, None, asyncio.Lock()
        llm._take(_Loaded(BatchLoop(lambda report: engine, max_batch_size), prompt_reader(engine, None)))
        return llm

    def _take(self, loaded: _Loaded) -> None:
        self._loaded = loaded
        self._finalizer = weakref.finalize(self, loaded.batches.close)

    # Its life.

    async def start(self) -> None:
        """Load the model, unless that is done. Raises what LLM's constructor raises. Cancelling gives it up."""
        async with self._starting:
            self._require_open()
            if self._loaded is not None:
                return
            self._given_up = threading.Event()
            loading = asyncio.get_running_loop().run_in_executor(None, self._load, self._given_up)
            try:
                self._take(await asyncio.shield(loading))
            except asyncio.CancelledError:
                self._given_up.set()
                loading.add_done_callback(_close_abandoned)
                raise
        if self._is_closed:  # meanwhile
            await self.aclose()
            raise EngineError(_CLOSED)

    def _load(self, given_up: threading.Event) -> _Loaded:
        """On another thread."""
        options = self._options
        assert options is not None

        def progress(*report: Any) -> None:
            if given_up.is_set():  # the only way to end a long load early
                raise EngineError("loading was given up")
            if self._progress is not None:
                self._progress(*report)

        batches = load_batches(options, progress)
        return _Loaded(batches, prompt_reader(batches.engine, options.seed))

    async def aclose(self) -> None:
        """End what runs, with an EngineError to those who wait, and free the model. Safe to call twice."""
        self._is_closed = True
        if self._given_up is not None:
            self._given_up.set()
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def __repr__(self) -> str:
        if self._is_closed:
            return "AsyncLLM(closed)"
        return f"AsyncLLM({'not loaded yet' if self._loaded is None else describe_batches(self._loaded.batches)})"

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError(_CLOSED)

    def _require_loaded(self) -> _Loaded:
        self._require_open()
        if self._loaded is None:
            raise EngineError("the model is not loaded yet: `await llm.start()`, or use `async with AsyncLLM(...)`")
        return self._loaded

    # What it is asked.

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises EngineError before the model is loaded."""
        return self._require_loaded().reader.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """What is used when a call names no sampling parameters. Raises EngineError before the model is loaded."""
        return self._require_loaded().reader.default_params

    @property
    def max_len(self) -> int:
        """Most tokens of one prompt and its answer together. Raises EngineError before the model is loaded."""
        return self._require_loaded().batches.config.max_len

    def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncAnswer:
        """The answer to one prompt: `async for` its events, or `await` the whole.

        request_id: a name of its own for `suspend` and `resume`, until the answer is over.
        """
        return self._answer(_Asked(lambda reader: reader.ids(prompt), sampling_params, request_id))

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        special_tokens_in_content: bool = False,
        request_id: str | None = None,
        **template_kwargs: Any,
    ) -> AsyncAnswer:
        """The next turn of one conversation (a string is one message of the user). See `generate`, and `LLM.chat`."""

        def read(reader: PromptReader) -> list[int]:
            return reader.conversation_ids(messages, tools, template_kwargs, special_tokens_in_content)

        return self._answer(_Asked(read, sampling_params, request_id))

    async def suspend(self, request_id: str) -> bool:
        """Set an answer aside, at whatever step it is: it holds no pages, and whoever reads it waits.

        Whether there is such a one, that has begun. See `LLM.suspend`.
        """
        return await asyncio.to_thread(self._require_loaded().batches.suspend, request_id)

    async def resume(self, request_id: str) -> bool:
        """Go on with an answer that is suspended. Whether there was such a one."""
        return await asyncio.to_thread(self._require_loaded().batches.resume, request_id)

    def _answer(self, asked: _Asked) -> AsyncAnswer:
        self._require_open()
        return AsyncAnswer(self._events(asked), asked)  # which the generator does not know: no cycle keeps it alive

    async def _events(self, asked: _Asked) -> AsyncGenerator[TokenEvent, None]:
        if self._loaded is None:
            await self.start()
        loaded, loop = self._require_loaded(), asyncio.get_running_loop()
        batches, params = loaded.batches, loaded.reader.params(asked.given)
        asked.prompt_ids, asked.params = await asyncio.to_thread(asked.read, loaded.reader), params
        batches.check(asked.prompt_ids, params)
        events: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()

        def sink(said: TokenEvent | EngineError) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, said)
            except RuntimeError:  # the event loop is closed, and its tasks with it
                batches.abort([question])

        question = Question(asked.prompt_ids, params, sink, asked.request_id)
        try:
            batches.submit([question])
            is_over = False
            while not is_over:
                said = await events.get()
                if isinstance(said, EngineError):
                    raise said
                yield said
                is_over = said.finish_reason is not None
        finally:
            batches.abort([question])


def _close_abandoned(loading: asyncio.Future[_Loaded]) -> None:
    """A model that was loaded although nobody waits for it any more."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().batches.close()
