"""The offline API: `LLM("model.gguf").generate(prompts, SamplingParams(...))`.

The prompts of one call, and of several threads, are answered together: they share the steps of one engine, and pages of
one cache where they begin alike. Each gets the tokens that it would get alone. Does not know HTTP or terminals.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, Unpack

from ktransformers.cache.page_folder import private_folder
from ktransformers.config import EngineConfig
from ktransformers.core import SamplingParams, TokenEvent
from ktransformers.engine.api.batch_loop import BatchLoop, EngineRequest
from ktransformers.engine.api.engine_loop import Build
from ktransformers.engine.api.generate import Control, prefill_and_generate
from ktransformers.engine.api.home import return_memory
from ktransformers.engine.api.llm_options import EngineKeywords, LLMOptions, llm_options
from ktransformers.engine.api.pictures import Pictures
from ktransformers.engine.sequence.keywords import SamplingKeywords, samples_of, split_keywords
from ktransformers.engine.sequence.outputs import (
    Conversation,
    Prompt,
    PromptReader,
    RequestOutput,
    collect_output,
    default_sampling_params,
    join_samples,
    raise_numbered,
)
from ktransformers.engine.sequence.partial import PartialGeneration
from ktransformers.engine.sequence.picture_parts import split_pictures
from ktransformers.engine.sequence.profiled import model_meta
from ktransformers.engine.sequence.prompts import PromptIds, check_callable
from ktransformers.engine.sequence.saved_session import SavedSession, as_path, begun_of, saved_of
from ktransformers.errors import EngineError, KTransformersError, UnsupportedError
from ktransformers.media.records import MediaItem
from ktransformers.profiling.capture import ProfileTarget
from ktransformers.scheduler.records import Request
from ktransformers.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from ktransformers.engine.load.builder import Engine

__all__ = [
    "LLM",
    "EngineKeywords",
    "Prompt",
    "RequestOutput",
    "close_all",
    "default_sampling_params",
    "describe_batches",
    "held",
    "load_batches",
    "open_loop",
    "open_with_pictures",
    "prompt_reader",
]

_REMEDY = "make the cache larger with cache_lens"
_CLOSED = "this LLM is closed: make a new one, or keep the `with` block open for as long as it is used"


class LLM:
    """A loaded model that answers prompts in this process. Loading happens in the constructor; its errors are those of
    `build_engine`.

    May be used from several threads at once: the model runs on a thread of its own, and what they ask shares its steps.
    An interrupt (Ctrl-C) ends the call that it meets; the LLM stays as it is. `close` it, or use it in a `with` block;
    one that is forgotten is closed when it is collected, or at exit. A process that is forked from the one that made it
    cannot use it: everything but `tokenizer` and `close`, which does nothing then, raises EngineError.
    """

    _is_closed = False

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        gguf_path: str | os.PathLike[str] | None = None,
        *,
        model_path: str | os.PathLike[str] | None = None,
        progress: Callable[..., None] | None = None,
        **options: Unpack[EngineKeywords],
    ):
        """Load a model. model: a GGUF file, a folder, or the hub id of a model that is on this machine; None is the
        bundled model.

        gguf_path, model_path: the same as two names, for a GGUF whose config and tokenizer are in another folder.
        progress: called while weights load, as `build_engine` describes, on the model's thread.
        options: see EngineOptions and EngineConfig.
        """
        check_callable("progress", progress)
        chosen = llm_options(model, gguf_path, model_path, options)
        self._take(*load_batches(chosen, progress), chosen.seed)

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """The API over an engine that is already built."""
        return cls.from_loop(BatchLoop(lambda report: engine))

    @classmethod
    def from_loop(cls, batches: BatchLoop[Engine], pictures: Pictures | None = None) -> LLM:
        """The API over a loop and the pictures of its model, which `close` closes. pictures None: it reads none."""
        llm = cls.__new__(cls)
        llm._take(batches, pictures, None)
        return llm

    def _take(self, batches: BatchLoop[Engine], pictures: Pictures | None, seed: int | None) -> None:
        self._home, self._batches, self._pictures = batches.home, batches, pictures
        self._reader = prompt_reader(batches.engine, seed, pictures)
        self._finalizer = weakref.finalize(self, close_all, batches, pictures)

    def close(self) -> None:
        """Stop the model's threads and free its weights and its cache. The object cannot be used afterwards.

        Safe to call twice. What another thread is waiting for ends with an EngineError. In a process that was forked
        from the one that loaded the model nothing happens: its threads and its memory are the other one's.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if not self._home.is_here:
            return
        self._finalizer()
        return_memory()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._is_closed:
            return "LLM(closed)"
        if not self._home.is_here:
            return "LLM(of another process)"
        return f"LLM({describe_batches(self._batches)})"

    @property
    def engine(self) -> Engine:
        """The loaded model. Raises EngineError once it is closed."""
        self._require_open()
        return self._batches.engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; one without vocabulary when the model's files hold none."""
        return self._reader.tokenizer

    def get_tokenizer(self) -> PreTrainedTokenizerFast:
        """The Hugging Face tokenizer, as vLLM's method of this name returns it. `tokenizer` is what this program uses.

        Raises ConfigError when the model's files hold no vocabulary.
        """
        backend: PreTrainedTokenizerFast = self.tokenizer.backend
        return backend

    @property
    def pictures(self) -> Pictures:
        """The pictures of the model. Raises UnsupportedError where it was loaded without what reads them."""
        if self._pictures is None:
            raise UnsupportedError("this model was loaded without what reads pictures")
        return self._pictures

    @property
    def default_params(self) -> SamplingParams:
        """The sampling parameters of a call that names none: the model's own, up to max_new_tokens tokens."""
        return self._reader.default_params

    @property
    def max_len(self) -> int:
        """The most tokens that one prompt and its answer can have together."""
        return self._batches.config.max_len

    @property
    def is_models_limit(self) -> bool:
        """Whether max_len is what the model takes, so that a larger cache would not help."""
        return self._batches.config.limits.is_models_limit

    @property
    def used_len(self) -> int:
        """Tokens that the cache has now, in whole pages: of what is being answered, and kept for prompts to come."""
        return self._batches.used_len

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        should_stop: Callable[[], bool] | None = None,
        on_prefill: Callable[[int, int], None] | None = None,
        request_id: str | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> Iterator[TokenEvent]:
        """The answer to one prompt, token by token. Raises ConfigError and ContextLengthError before any work.

        keywords: fields of SamplingParams, in place of those of sampling_params, or of the model's defaults.

        should_stop: asked now and then, on this thread; when it says yes the answer ends with ABORT. So does an
        iterator that is closed or dropped, without an event. Several may be open at once.
        on_prefill: told at every chunk of the prompt how many tokens are computed, and how many have to be.
        request_id: a name of its own for `suspend` and `resume`, until the iterator has ended or is closed.
        """
        self._require_open()
        sampling, _ = split_keywords("stream", keywords)
        ids, params = self._reader.ids(prompt), self._reader.params(sampling_params, sampling)
        if params.n > 1:
            raise UnsupportedError("a stream is one answer: n is for generate and chat; open several streams")
        check_callable("should_stop", should_stop)
        check_callable("on_prefill", on_prefill)
        self._batches.check(ids, params, ids.media)
        request = EngineRequest(Request(prompt_ids=ids, params=params, media=ids.media), name=request_id)
        return self._events(request, Control(should_stop, on_prefill))

    def read_chat(
        self,
        messages: Conversation,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        special_tokens_in_content: bool = False,
        **keywords: Any,
    ) -> PromptIds:
        """The prompt of a conversation's next turn, its pictures read, for `stream`. See `chat`."""
        self._require_open()
        _, template = split_keywords("chat", keywords, self._reader.tokenizer)
        return self._reader.conversation_ids(messages, tools, template, special_tokens_in_content)

    def suspend(self, request_id: str) -> bool:
        """Set the `stream` of this name aside, at whatever step it is: it holds no pages, and its iterator waits.

        Returns whether there is one. May be called on any thread, between two events of the iterator too; the tokens
        that come after `resume` are those that would have come.
        """
        self._require_open()
        return self._batches.suspend(request_id)

    def resume(self, request_id: str) -> bool:
        """Go on with a `stream` that is suspended. Returns whether there was one. See `suspend`."""
        self._require_open()
        return self._batches.resume(request_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **keywords: Unpack[SamplingKeywords],
    ) -> list[RequestOutput]:
        """The answers to one or more prompts, in order. sampling_params: for all of them, or one per prompt.

        Prompts are text or token ids: lists, arrays and tensors of one axis, or of two for several prompts.
        keywords: fields of SamplingParams, in place of those of sampling_params, or of the model's defaults. n=4 gives
        four answers to each prompt, in `outputs` of its RequestOutput.

        Prompts beyond max_batch_size, or for which there is no room in the cache, wait for others to end. Raises
        ConfigError and ContextLengthError before any work, with the number of the prompt; EngineError when an answer
        could not be computed to its end.
        """
        self._require_open()
        sampling, _ = split_keywords("generate", keywords)
        return self._answer_all(self._reader.all_ids(prompts), sampling_params, sampling)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        special_tokens_in_content: bool = False,
        **keywords: Any,
    ) -> list[RequestOutput]:
        """The next turn of one conversation, or of several, through the model's chat template.

        A conversation is a list of messages, or a string, which is one message of the user. Special tokens that one
        spells are text, so that nobody can forge a turn; special_tokens_in_content reads them as tokens.
        keywords: fields of SamplingParams, as in `generate`, and variables of the chat template, such as
        enable_thinking=False; those may also be a dict, chat_template_kwargs. Raises ConfigError for a keyword that is
        neither. See `generate`.

        Contents may be lists of parts, with pictures among them where the model reads any: {"type": "image", "image": a
        path, bytes, a PIL image or a data URL}, or OpenAI's image_url parts with data URLs.
        """
        self._require_open()
        sampling, template = split_keywords("chat", keywords, self._reader.tokenizer)
        all_ids = self._reader.all_conversation_ids(messages, tools, template, special_tokens_in_content)
        return self._answer_all(all_ids, sampling_params, sampling)

    def save_session(
        self,
        path: str | os.PathLike[str],
        session: RequestOutput | SavedSession | PartialGeneration | Sequence[int],
        messages: list[dict[str, Any]] | None = None,
    ) -> SavedSession:
        """Write an answer with its prompt, a session that was loaded, or token ids, to one file, with what the cache
        keeps of these tokens.

        An answer that was stopped (`should_stop`) can be continued from the file. messages: kept with it. Others are
        answered meanwhile. Raises SessionFileError when it cannot be written; what was at `path` is still there then.
        """
        self._require_open()
        return self._batches.save(as_path(path), begun_of(session), messages)

    def saved_nbytes(self, token_ids: Sequence[int]) -> int:
        """Bytes of what the cache keeps of these tokens, which `save_session` would write."""
        self._require_open()
        return self._batches.visit(lambda store: store.nbytes(token_ids))

    def load_session(self, path: str | os.PathLike[str], *, recompute: bool = False) -> SavedSession:
        """Put what a file keeps into the cache: prompts that begin with its token_ids go on from there.

        recompute: take one that was computed in another way (on a GPU, say) for its tokens alone. Raises
        SessionFileError for one that is damaged or of another model, ContextLengthError for one that is too long.
        Pictures are read again from its messages.
        """
        self._require_open()
        saved = self._batches.load(as_path(path), recompute)
        if saved.media and saved.messages is not None:
            self.pictures.read(split_pictures(saved.messages)[1])
        return saved

    def continue_answer(
        self,
        session: SavedSession,
        sampling_params: SamplingParams | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Iterator[TokenEvent]:
        """The rest of a session's last answer, token by token, as it would have gone on. See `stream`.

        sampling_params: others than its own, with more max_tokens, say. Raises ConfigError when the answer is over.
        """
        self._require_open()
        begun = saved_of(session).begun(sampling_params)
        begun = replace(begun, params=self._reader.params(begun.params))
        request = EngineRequest(begun.request)
        self._batches.check_begun(request)
        if begun.media and self._pictures is not None:
            self._pictures.require_all(begun.media)
        return self._events(request, Control(should_stop))

    def _require_open(self) -> None:
        if self._is_closed:
            raise EngineError(_CLOSED)
        self._home.require()

    def _answer_all(
        self,
        all_ids: Sequence[PromptIds],
        given: SamplingParams | Sequence[SamplingParams] | None,
        keywords: Mapping[str, Any],
    ) -> list[RequestOutput]:
        params = self._reader.all_params(given, len(all_ids), keywords)
        each = list(zip(all_ids, params, strict=True))
        samples = [(ids, sample) for ids, one in each for sample in samples_of(one)]
        _check_all(self._batches, each)
        numbers = [number for number, (_, one) in enumerate(each) for _ in range(one.n)]
        with held(self._pictures, [item for ids in all_ids for item in ids.media]):
            answers = iter(_answer_batch(self._batches, samples, numbers))
        return [join_samples([next(answers) for _ in range(one.n)]) for _, one in each]

    def _events(self, request: EngineRequest, control: Control) -> Iterator[TokenEvent]:
        """A method, so that the LLM is not closed while its last user iterates."""
        with held(self._pictures, request.request.media):
            yield from prefill_and_generate(self._batches, request, control)


def load_batches(
    options: LLMOptions, progress: Callable[..., None] | None, name: str = "offline"
) -> tuple[BatchLoop[Engine], Pictures]:
    """Load a model for many prompts at once, and what reads its pictures. name: what profiles call the program. Errors
    as `build_engine`."""
    from ktransformers.engine.load.builder import build_engine  # late: it imports every operator and kernel

    def build(config: EngineConfig, report: Callable[..., None]) -> Engine:
        return build_engine(config, report, page_size=options.page_size, max_batch_size=options.max_batch_size)

    return open_with_pictures(options.config, build, progress, options.profile, name)


def open_with_pictures(
    config: EngineConfig,
    build: Callable[[EngineConfig, Callable[..., None]], Engine],
    progress: Callable[..., None] | None,
    profile: ProfileTarget | None,
    name: str,
    remedy: str = _REMEDY,
) -> tuple[BatchLoop[Engine], Pictures]:
    """Open a loop as `open_loop`, and the pictures of its model. build: gets the config with the pictures' folder."""
    pictures = Pictures(config)
    try:
        loop = open_loop(
            pictures.config, lambda report: build(pictures.config, report), progress, profile, name, remedy
        )
        pictures.attach(loop.engine.model.tokenizer, has_tower=loop.engine.pictures is not None)
    except BaseException:
        pictures.close()
        raise
    return loop, pictures


def close_all(batches: BatchLoop[Engine], pictures: Pictures | None) -> None:
    """Close a loop and the pictures of its model."""
    batches.close()
    if pictures is not None:
        pictures.close()


def held(pictures: Pictures | None, media: Sequence[MediaItem]) -> AbstractContextManager[None]:
    """Keep the files of a request's pictures meanwhile."""
    return nullcontext() if pictures is None else pictures.held(media)


def open_loop(
    config: EngineConfig,
    build: Build[Engine],
    progress: Callable[..., None] | None,
    profile: ProfileTarget | None,
    name: str,
    remedy: str = _REMEDY,
) -> BatchLoop[Engine]:
    """Open a loop over the engine that `build` makes of `config`, with its steps in a profile if one is wanted.

    name: what the profile calls the program. remedy: see BatchLoop. Raises what `build` raises, and ConfigError for
    folders that cannot be used.
    """
    if config.kv_disk_path is not None:
        private_folder(config.kv_disk_path)
    loop = BatchLoop(build, progress, remedy=remedy)
    try:
        if profile is not None:
            loop.write_profile(profile, model_meta(loop.engine, name))
    except BaseException:
        loop.close()
        raise
    return loop


def prompt_reader(engine: Engine, seed: int | None, pictures: Pictures | None = None) -> PromptReader:
    """Make the PromptReader that reads prompts, and their pictures, for `engine`."""
    defaults = default_sampling_params(engine.model.generation_defaults, engine.config.max_new_tokens)
    if pictures is None:
        return PromptReader(engine.model.tokenizer, defaults, seed)
    return PromptReader(engine.model.tokenizer, defaults, seed, pictures.read)


def describe_batches(batches: BatchLoop[Engine]) -> str:
    """Describe a loaded model, its cache and how many prompts it answers at once in one line."""
    config = batches.config
    at_once = "one prompt at a time" if config.max_running == 1 else f"{config.max_running} prompts at once"
    return f"{batches.description}, {config.total_len} tokens of cache, {at_once}"


def _check_all(batches: BatchLoop[Engine], each: Sequence[tuple[PromptIds, SamplingParams]]) -> None:
    """Raises what `BatchLoop.check` does, with the number of the prompt."""
    for index, (ids, params) in enumerate(each):
        try:
            batches.check(ids, params, ids.media)
        except KTransformersError as error:
            raise_numbered(error, index, len(each))


def _answer_batch(
    batches: BatchLoop[Engine], each: Sequence[tuple[PromptIds, SamplingParams]], numbers: Sequence[int]
) -> list[RequestOutput]:
    """All answers, or none: whatever ends this early, an interrupt too, ends all that has been asked here.

    numbers: which of the caller's prompts each of them answers, for errors.
    """
    requests = [EngineRequest(Request(prompt_ids=ids, params=params, media=ids.media)) for ids, params in each]
    answers = [prefill_and_generate(batches, request).queued() for request in requests]
    outputs = []
    try:
        batches.submit(requests)
        for (ids, params), answer, number in zip(each, answers, numbers, strict=True):
            try:
                events = list(answer)
            except EngineError as error:
                raise_numbered(error, number, numbers[-1] + 1)
            outputs.append(collect_output(ids, params, events))
    finally:
        batches.abort(requests[len(outputs) :])
    return outputs
