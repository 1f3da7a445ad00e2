"""The offline API for asyncio: answers as asynchronous streams, computed together on the model's own thread.

Nothing here blocks the event loop: loading, tokenizing and closing run on other threads, events come through queues.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest, PrefillChunk
from ktransformers.engine.api.generate import prefill_and_generate
from ktransformers.engine.api.home import OwnerProcess, return_memory
from ktransformers.engine.api.llm import close_all, describe_batches, held, load_batches, prompt_reader
from ktransformers.engine.api.llm_options import EngineKeywords, LLMOptions, llm_options
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.sequence.keywords import SamplingKeywords, samples_of, split_keywords
from ktransformers.engine.sequence.outputs import (
    Conversation,
    Prompt,
    PromptReader,
    RequestOutput,
    collect_output,
    join_samples,
)
from ktransformers.engine.sequence.picture_parts import split_pictures
from ktransformers.engine.sequence.prompts import PromptIds, check_callable
from ktransformers.engine.sequence.saved_session import SavedSession, as_path, begun_of, saved_of
from ktransformers.errors import EngineError, UnsupportedError
from ktransformers.scheduler.records import Request
from ktransformers.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ktransformers.engine.load.builder import Engine

__all__ = ["AsyncAnswer", "AsyncLLM"]

_CLOSED = "this AsyncLLM is closed: make a new one, or stay inside the `async with` block for as long as it is used"


@dataclass(slots=True)
class _Asked:
    """What an answer is to; the ids and the parameters with their seed are known once it has begun.

    read: makes the ids of the prompt, and the parameters. num_samples: answers that were asked for.
    """

    read: Callable[[PromptReader], tuple[PromptIds, SamplingParams]]
    request_id: str | None = None
    num_samples: int = 1
    prompt_ids: PromptIds = field(default_factory=PromptIds)
    params: SamplingParams | None = None
    answer_ids: Sequence[int] = ()  # of an answer that was begun before


class AsyncAnswer:
    """An answer on its way: `async for event in answer` gives its events as they come, `await answer` the whole.

    It begins when it is first waited for. Leaving the loop, `aclose`, or cancelling the task ends it and frees its
    pages. Only one of the two ways, and only once. With n answers to a prompt, only `await` is possible.
    """

    def __init__(self, events: AsyncGenerator[TokenEvent, None], asked: _Asked, others: Sequence[AsyncAnswer] = ()):
        """Make an answer of its events. others: the further answers to the same prompt."""
        self._events, self._asked, self._others = events, asked, others

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        if self._others:
            raise UnsupportedError("a stream is one answer: with n, await all; or iterate over several answers")
        return self._events

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self._whole().__await__()

    async def _whole(self) -> RequestOutput:
        if self._others:
            tasks = [asyncio.create_task(one._one()) for one in (self, *self._others)]
            try:
                return join_samples(await asyncio.gather(*tasks))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return await self._one()

    async def _one(self) -> RequestOutput:
        events = [event async for event in self._events]
        if not events or self._asked.params is None:
            raise EngineError("this answer has been read already, or was closed: ask again")
        return collect_output(self._asked.prompt_ids, self._asked.params, events)

    async def aclose(self) -> None:
        """End the answer, if it is not over. Safe to call twice."""
        for one in (self, *self._others):
            await one._events.aclose()


@dataclass(frozen=True, slots=True)
class _Loaded:
    batches: BatchLoop[Engine]
    reader: PromptReader
    pictures: Pictures | None = None

    def close(self) -> None:
        close_all(self.batches, self.pictures)


class AsyncLLM:
    """A model for many concurrent tasks of one event loop. `async with AsyncLLM() as llm:` loads and closes it.

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
        **options: Unpack[EngineKeywords],
    ):
        """Check the keywords, which are those of LLM, and load nothing yet. progress is called on another thread."""
        check_callable("progress", progress)
        self._options: LLMOptions | None = llm_options(model, gguf_path, model_path, options)
        self._progress = progress
        self._starting, self._home = asyncio.Lock(), OwnerProcess()

    @classmethod
    def from_engine(cls, engine: Engine) -> AsyncLLM:
        """The API over an engine that is already built."""
        llm = cls.__new__(cls)
        llm._options, llm._progress, llm._starting = None, None, asyncio.Lock()
        llm._take(_Loaded(BatchLoop(lambda report: engine), prompt_reader(engine, None)))
        return llm

    def _take(self, loaded: _Loaded) -> None:
        self._loaded, self._home = loaded, loaded.batches.home
        self._finalizer = weakref.finalize(self, loaded.close)

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

        batches, pictures = load_batches(options, progress)
        return _Loaded(batches, prompt_reader(batches.engine, options.seed, pictures), pictures)

    async def aclose(self) -> None:
        """End running answers, with an EngineError to those who wait, and free the model. Safe to call twice."""
        self._is_closed = True
        if not self._home.is_here:
            return
        if self._given_up is not None:
            self._given_up.set()
        if self._finalizer is not None:
            await asyncio.to_thread(self._finalizer)
            self._loaded = None
            await asyncio.to_thread(return_memory)

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
        self._home.require()

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

    async def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The Hugging Face tokenizer; see `LLM.get_tokenizer`. Loads the model, if that is not done."""
        if self._loaded is None:
            await self.start()
        backend: PreTrainedTokenizerFast = self.tokenizer.backend
        return backend

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of calls that name none. Raises EngineError before the model is loaded."""
        return self._require_loaded().reader.default_params

    @property
    def max_len(self) -> int:
        """The most tokens that one prompt and its answer can have together. Raises EngineError before the model is
        loaded."""
        return self._require_loaded().batches.config.max_len

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> AsyncAnswer:
        """The answer to one prompt: `async for` its events, or `await` the whole.

        request_id: a name of its own for `suspend` and `resume`, until the answer is over. keywords: fields of
        SamplingParams, as in `LLM.generate`.
        """

        def read(reader: PromptReader) -> tuple[PromptIds, SamplingParams]:
            sampling, _ = split_keywords("generate", keywords)
            return reader.ids(prompt), reader.params(sampling_params, sampling)

        return self._answer(_Asked(read, request_id, _num_samples(sampling_params, keywords)))

    def chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        special_tokens_in_content: bool = False,
        request_id: str | None = None,
        **keywords: Any,
    ) -> AsyncAnswer:
        """The next turn of one conversation (a string is one message of the user). See `generate`, and `LLM.chat`."""

        def read(reader: PromptReader) -> tuple[PromptIds, SamplingParams]:
            sampling, template = split_keywords("chat", keywords, reader.tokenizer)
            ids = reader.conversation_ids(messages, tools, template, special_tokens_in_content)
            return ids, reader.params(sampling_params, sampling)

        return self._answer(_Asked(read, request_id, _num_samples(sampling_params, keywords)))

    async def suspend(self, request_id: str) -> bool:
        """Set an answer aside, at whatever step it is: it holds no pages, and whoever reads it waits.

        Returns whether there is such an answer, and it has begun. See `LLM.suspend`.
        """
        return await asyncio.to_thread(self._require_loaded().batches.suspend, request_id)

    async def resume(self, request_id: str) -> bool:
        """Go on with an answer that is suspended. Returns whether there was one."""
        return await asyncio.to_thread(self._require_loaded().batches.resume, request_id)

    def continue_answer(self, session: SavedSession, sampling_params: SamplingParams | None = None) -> AsyncAnswer:
        """The rest of a session's last answer: its events, and what is awaited, have the tokens that follow.

        See `LLM.continue_answer`.
        """
        begun = saved_of(session).begun(sampling_params)

        def read(reader: PromptReader) -> tuple[PromptIds, SamplingParams]:
            if begun.media and (pictures := self._require_loaded().pictures) is not None:
                pictures.require_all(begun.media)
            return PromptIds(begun.prompt_ids, begun.media), reader.params(begun.params)

        return self._answer(_Asked(read, answer_ids=begun.answer_ids))

    async def save_session(
        self,
        path: str | os.PathLike[str],
        session: RequestOutput | Sequence[int],
        messages: list[dict[str, Any]] | None = None,
    ) -> SavedSession:
        """Save an answer or token ids to a session file, see `LLM.save_session`. The file is written on another
        thread."""
        batches = self._require_loaded().batches
        return await asyncio.to_thread(batches.save, as_path(path), begun_of(session), messages)

    async def load_session(self, path: str | os.PathLike[str], *, recompute: bool = False) -> SavedSession:
        """Load a session file into the cache, see `LLM.load_session`. The file is read on another thread. Loads the
        model, if that is not done."""
        if self._loaded is None:
            await self.start()
        loaded = self._require_loaded()
        saved = await asyncio.to_thread(loaded.batches.load, as_path(path), recompute)
        if saved.media and saved.messages is not None and loaded.pictures is not None:
            await asyncio.to_thread(loaded.pictures.read, split_pictures(saved.messages)[1])
        return saved

    def _answer(self, asked: _Asked) -> AsyncAnswer:
        self._require_open()
        if asked.num_samples > 1 and asked.request_id is not None:
            raise UnsupportedError("request_id names one answer: leave it out with n")
        others = [replace(asked) for _ in range(1, asked.num_samples)]
        further = [AsyncAnswer(self._events(one, index), one) for index, one in enumerate(others, 1)]
        # The generator does not know its answer: no cycle keeps it alive.
        return AsyncAnswer(self._events(asked), asked, further)

    async def _events(self, asked: _Asked, index: int = 0) -> AsyncGenerator[TokenEvent, None]:
        """index: which of the n answers to the prompt this is."""
        if self._loaded is None:
            await self.start()
        loaded, loop = self._require_loaded(), asyncio.get_running_loop()
        batches = loaded.batches
        asked.prompt_ids, params = await asyncio.to_thread(asked.read, loaded.reader)
        asked.params = params = samples_of(params)[index]
        events: asyncio.Queue[TokenEvent | EngineError] = asyncio.Queue()

        def sink(said: TokenEvent | PrefillChunk | EngineError) -> None:
            assert not isinstance(said, PrefillChunk), "nobody asks for progress"
            try:
                loop.call_soon_threadsafe(events.put_nowait, said)
            except RuntimeError:  # the event loop is closed, and its tasks with it
                batches.abort([request])

        media = asked.prompt_ids.media
        request = EngineRequest(
            Request(prompt_ids=asked.prompt_ids, params=params, answer_ids=asked.answer_ids, media=media),
            name=asked.request_id,
        )
        batches.check_begun(request)
        generation = prefill_and_generate(batches, request)
        try:
            with held(loaded.pictures, media):
                generation.begin(sink)
                is_over = False
                while not is_over:
                    batches.home.require()
                    said = await events.get()
                    if isinstance(said, EngineError):
                        raise said
                    yield said
                    is_over = said.finish_reason is not None
        finally:
            generation.close()


def _num_samples(params: SamplingParams | None, keywords: Mapping[str, Any]) -> int:
    """How many answers are asked for; what is wrong with the number is said where the answer is waited for."""
    n = keywords.get("n", params.n if isinstance(params, SamplingParams) else 1)
    return n if isinstance(n, int) and n > 1 else 1


def _close_abandoned(loading: asyncio.Future[_Loaded]) -> None:
    """A model that was loaded although nobody waits for it any more."""
    if not loading.cancelled() and loading.exception() is None:
        loading.result().close()
