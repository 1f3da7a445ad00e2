"""The part of a session that outlives its process: taken out of an engine and written, read and checked, and put into
another.

    BatchLoop ── StoredSession ── write ── FILE ── read ──> BatchLoop

Does not know caches: a BatchLoop says what is kept, and takes it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ktransformers.core import SamplingParams
from ktransformers.engine.model.fingerprint import ModelIdentity
from ktransformers.engine.sequence.outputs import RequestOutput
from ktransformers.engine.sequence.partial import PartialGeneration
from ktransformers.engine.sequence.prompts import PromptIds, ids_of, media_of, shown
from ktransformers.engine.sequence.session_file import SessionFile, SessionHeader, open_session, write_session
from ktransformers.engine.sequence.session_store import StoredSession
from ktransformers.errors import ConfigError, ContextLengthError
from ktransformers.media.records import MediaItem
from ktransformers.scheduler.limits import Limits, tokens_beside

__all__ = ["SavedSession", "as_path", "begun_of", "read_saved", "saved_of", "write_saved"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A session that was saved or loaded.

    token_ids: all of it; the first prompt_len were the prompt of the last answer, whose parameters are params, None
    without an answer. cached_len: of how many leading tokens keys and values are in the file, or, loaded, in the cache.
    messages: the conversation, if it was saved with one. nbytes: of the file. media: pictures among the tokens.
    """

    token_ids: tuple[int, ...]
    prompt_len: int
    params: SamplingParams | None
    cached_len: int
    messages: list[dict[str, Any]] | None
    nbytes: int
    media: tuple[MediaItem, ...] = ()

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        """Token ids of the last answer's prompt."""
        return self.token_ids[: self.prompt_len]

    @property
    def answer_ids(self) -> tuple[int, ...]:
        """Token ids of the last answer."""
        return self.token_ids[self.prompt_len :]

    def begun(self, params: SamplingParams | None) -> PartialGeneration:
        """Return the last answer, to be continued. params: others than its own. Raises ConfigError when there is
        none."""
        params = self.params if params is None else params
        if params is not None and not isinstance(params, SamplingParams):
            raise ConfigError(f"sampling_params must be SamplingParams, got {shown(params)}")
        if params is not None and params.n > 1:
            raise ConfigError(f"a session has one answer to continue: n must be 1, got {params.n}")
        if params is None:
            raise ConfigError("the session has no answer to continue: give sampling_params, or use its token_ids")
        if params.seed is None and self.params is not None:
            params = replace(params, seed=self.params.seed)
        # Both are about the prompt, and came with the first token.
        params = replace(params, prompt_logprobs=None, pooling=None)
        return PartialGeneration(self.prompt_ids, params, self.answer_ids, self.media)


def begun_of(
    session: RequestOutput | SavedSession | PartialGeneration | Sequence[int],
) -> PartialGeneration | Sequence[int]:
    """Return what is saved of an answer, of one that was saved before, or of tokens. Raises ConfigError for what is
    none of these."""
    if isinstance(session, PartialGeneration):
        return session
    if isinstance(session, SavedSession):
        if session.params is None:
            return PromptIds(session.token_ids, session.media)
        return PartialGeneration(session.prompt_ids, session.params, session.answer_ids, session.media)
    if isinstance(session, RequestOutput):
        return PartialGeneration(session.prompt_token_ids, session.params, session.token_ids, session.media)
    return ids_of(session, _no_text)


def _no_text(text: str) -> list[int]:
    raise ConfigError(f"a session is a RequestOutput or a list of token ids, got {shown(text)}")


def saved_of(session: object) -> SavedSession:
    """Return `session` if it is what `load_session` returned. Raises ConfigError for anything else."""
    if not isinstance(session, SavedSession):
        raise ConfigError(f"a session to continue is what load_session returns, got {shown(session)}")
    return session


def as_path(path: object) -> Path:
    """Return the path of a session's file. Raises ConfigError for what is no path."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path must be the name of a file, got {shown(path)}")
    return Path(path)


def write_saved(
    path: Path,
    identity: ModelIdentity,
    session: PartialGeneration | Sequence[int],
    kept: StoredSession,
    messages: list[dict[str, Any]] | None,
) -> SavedSession:
    """Write a session with what is kept of its first tokens. Raises SessionFileError."""
    media: tuple[MediaItem, ...] = ()
    if isinstance(session, PartialGeneration):
        token_ids, prompt_len, params = _known(session), len(session.prompt_ids), session.params
        media = tuple(session.media)
    else:
        token_ids, prompt_len, params = tuple(session), len(session), None
        media = media_of(session)
    header = SessionHeader(
        model=identity,
        cached_len=kept.cached_len,
        prompt_len=prompt_len,
        params=params,
        state_lens=kept.state_lens,
        messages=messages,
        media=media,
    )
    nbytes = write_session(path, header, token_ids, kept.tensors)
    return SavedSession(token_ids, prompt_len, params, kept.cached_len, messages, nbytes, media)


def _known(begun: PartialGeneration) -> tuple[int, ...]:
    return (*begun.prompt_ids, *begun.answer_ids)


def read_saved(
    path: Path, identity: ModelIdentity, limits: Limits, recompute: bool
) -> tuple[SavedSession, SessionFile | None]:
    """Read and check a session for a model. The file when what it keeps can be used, None when it must be recomputed.

    Raises SessionFileError for one of another model or, unless `recompute`, of one that computes in another way, and
    ContextLengthError for one that is too long here.
    """
    file = open_session(path)
    header, token_ids = file.header, file.token_ids
    difference = identity.other_model(header.model)
    if difference is not None:
        raise file.fail(difference)
    try:
        named = tokens_beside(token_ids, header.media)
    except ConfigError as error:
        raise file.fail(str(error)) from error
    if named and not 0 <= min(named) <= max(named) < limits.vocab_size + limits.num_extra_ids:
        raise file.fail("it names tokens that the model does not have")
    if len(token_ids) > limits.max_len:
        raise ContextLengthError(
            f"the session in {path} has {len(token_ids)} tokens, and the cache holds {limits.max_len} of a sequence; "
            + ("the model takes no more" if limits.is_models_limit else "make it larger with cache_lens"),
            prompt_len=len(token_ids),
            max_len=limits.max_len,
        )
    difference = identity.other_arithmetic(header.model)
    if difference is not None and not recompute:
        raise file.fail(f"{difference}. Its tokens can be used: recompute=True computes their keys and values again")
    known = token_ids, header.prompt_len, header.params, header.cached_len, header.messages
    saved = SavedSession(*known, file.nbytes, header.media)
    if difference is None:
        return saved, file
    logger.warning("the %d tokens of the session are computed again: %s", len(token_ids), difference)
    return replace(saved, cached_len=0), None
