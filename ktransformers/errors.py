"""Every error that ktransformers raises on purpose, as one tree.

    KTransformersError
    ├── ConfigError             a flag, a path or a config value is wrong
    │   ├── UnsupportedError    valid, but this program does not do it
    │   ├── FieldError          a field of a request is wrong or cannot be honoured; carries its name
    │   ├── PromptError         a model cannot compute a prompt
    │   └── ConversationError   a model's chat template refuses a conversation, which its words may quote
    ├── RuleError               a rule file is wrong; carries file, line and rule number
    ├── WeightError             a weight file is wrong or does not fit the model
    │   ├── FormatError         truncated, corrupt or hostile bytes
    │   └── TensorMismatchError a tensor is missing, left over, or has the wrong shape
    ├── SessionFileError        a saved session is damaged, or of another model; nothing of it was used
    ├── CapacityError           does not fit in memory or in the cache
    │   └── ContextLengthError  prompt plus answer are longer than the cache
    ├── KernelError             the native extension is missing or cannot run here
    ├── EngineError             the engine failed while it computed an answer, or its process is gone for good
    │   ├── ConstraintError     its constraints leave an answer no token; the request is at fault
    │   └── StageLostError      a stage of a divided model is gone; another one may take its place
    ├── ListenError             another program has the port that is to be listened on
    └── ServiceError            a request that cannot be served as it came, or not now
        ├── AuthenticationError     no API key, or a wrong one
        ├── MisdirectedRequestError the request names a host that this server is not
        ├── OriginError             a web page of another site asks
        ├── ModelNotFoundError      the request names a model that is not served
        ├── UnknownIdError          the request refers to something that is not kept
        ├── ConflictError           the request asks for what is so already, or for the end of what is not
        ├── PayloadTooLargeError    the request's body is longer than the server takes
        ├── NotReadyError           the model is still loading, or the server is draining
        │   └── LoadFailedError     the model could not be loaded; others of the server are not concerned
        ├── QueueFullError          too many requests wait already
        ├── RateLimitError          this API key has used up what it may
        ├── DeadlineError           the answer was not complete in the time that the request gave it
        └── SlowReaderError         the client does not read its stream

A message says what is wrong and what to do about it. The command line prints it without a traceback.
"""

from __future__ import annotations

import re

__all__ = [
    "MODULE_FAILURES",
    "AuthenticationError",
    "CapacityError",
    "ConfigError",
    "ConflictError",
    "ConstraintError",
    "ContextLengthError",
    "ConversationError",
    "DeadlineError",
    "EngineError",
    "FieldError",
    "FormatError",
    "KTransformersError",
    "KernelError",
    "ListenError",
    "LoadFailedError",
    "MisdirectedRequestError",
    "ModelNotFoundError",
    "NotReadyError",
    "OriginError",
    "PayloadTooLargeError",
    "PromptError",
    "QueueFullError",
    "RateLimitError",
    "RuleError",
    "ServiceError",
    "SessionFileError",
    "SlowReaderError",
    "StageLostError",
    "TensorMismatchError",
    "UnknownIdError",
    "UnsupportedError",
    "WeightError",
    "named_reason",
    "reason_of",
]

_ADVICE = re.compile(
    r"[.,;:]?\s*(If you were trying to load|If this is a private|Make sure|make sure that|You can update|You can avoid|"
    r"Please pass|Please make sure|Please provide|You can inspect|Checkout your|Check out your|This could be because|"
    r"Should have a|Otherwise, make sure|If this does not work|See https?:|Couldn't connect|We couldn't).*",
    re.DOTALL,
)
_LINK = re.compile(r"\s*\(?(?:at |see )?'?https?://\S+")
_MAX_REASON = 200

MODULE_FAILURES = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError)
"""What the modules of any family may raise when they are given what they do not expect."""


def reason_of(error: BaseException) -> str:
    """Return what an exception of another library says, to stand inside one line of ours.

    Its advice about hubs and upgrades is for programs that download models; ours says itself what to do.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, KeyError):
        return f"the key {error} is missing"
    text = " ".join(_LINK.sub("", _ADVICE.sub("", str(error))).split())
    text = text.strip(" .:;,") or type(error).__name__
    return text if len(text) <= _MAX_REASON else text[: _MAX_REASON - 3] + "..."


def named_reason(error: BaseException) -> str:
    """Return an exception's class and the first line of what it says, for errors of code that is not ours."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), 'no message')}"


class KTransformersError(Exception):
    """The base of all errors that are reported to the user as one message."""


class ConfigError(KTransformersError, ValueError):
    """A flag, a path or a value of a model's config is wrong."""


class UnsupportedError(ConfigError):
    """The input is well-formed, but this program does not do it."""


class FieldError(ConfigError):
    """A field of a request is wrong, or cannot be honoured. param: its name, in the client's spelling.

    code: the word by which clients of the dialect know this refusal, where they have one.
    """

    def __init__(self, message: str, param: str, code: str | None = None):
        super().__init__(message)
        self.param, self.code = param, code


class PromptError(ConfigError):
    """A model cannot compute a prompt, whatever the fields that it came in."""


class ConversationError(ConfigError):
    """A model's chat template refuses a conversation. The message may quote it, so it belongs into no log."""


class RuleError(KTransformersError, ValueError):
    """A rule file is wrong.

    file, line (1-based) and rule (1-based number of the rule in its file) are part of the text when known; message is
    the text without them.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None, rule: int | None = None):
        self.message, self.file, self.line, self.rule = message, file, line, rule
        where = file or ""
        if line is not None:
            where += f":{line}"
        if rule is not None:
            where += f" (rule {rule})"
        super().__init__(f"{where.strip()}: {message}" if where else message)


class WeightError(KTransformersError):
    """A weight file is wrong or does not fit the model."""


class FormatError(WeightError, ValueError):
    """A file's bytes are truncated, corrupt or hostile. The message names the file."""


class TensorMismatchError(WeightError, ValueError):
    """A tensor is missing, left over, or has the wrong shape. The message names the tensor."""


class SessionFileError(KTransformersError, ValueError):
    """A saved session cannot be used: it is damaged, in another format, or of another model. Nothing of it was used."""


class CapacityError(KTransformersError):
    """Something does not fit in the memory or in the cache that there is."""


class ContextLengthError(CapacityError, ValueError):
    """A prompt, or a prompt plus its answer, is longer than the cache.

    prompt_len and max_len are in tokens.
    """

    def __init__(self, message: str, *, prompt_len: int, max_len: int):
        self.prompt_len, self.max_len = prompt_len, max_len
        super().__init__(message)


class KernelError(KTransformersError, RuntimeError):
    """The native extension is missing, was built from another version, or cannot run on this processor."""


class EngineError(KTransformersError, RuntimeError):
    """The engine failed while it computed an answer, or its process is gone for good."""


class ConstraintError(EngineError):
    """What an answer was asked to follow leaves no token that may come next: the same request would end so again."""


class StageLostError(EngineError):
    """A stage of a divided model is gone, and the steps under way with it. Another one may take its place."""


class ListenError(KTransformersError):
    """The port to listen on is taken by another program. It may be free later."""


class ServiceError(KTransformersError):
    """A request that cannot be served as it came, or not now."""


class AuthenticationError(ServiceError):
    """The request carries no API key, or a wrong one."""


class MisdirectedRequestError(ServiceError):
    """The request's Host is a name that this server does not go by."""


class OriginError(ServiceError):
    """A browser says that a page of another site asks, and that site is not allowed to."""


class ModelNotFoundError(ServiceError):
    """The request names a model that is not served."""


class UnknownIdError(ServiceError):
    """The request refers to something that is not kept, or not for this client."""


class ConflictError(ServiceError):
    """The request asks for what is so already, or for the end of what is not."""


class PayloadTooLargeError(ServiceError):
    """The request's body is longer than the server takes."""


class NotReadyError(ServiceError):
    """The model is still loading, or the server is draining."""


class LoadFailedError(NotReadyError):
    """The model could not be loaded. retry_after: seconds until it is worth trying again."""

    def __init__(self, message: str, *, retry_after: float):
        self.retry_after = retry_after
        super().__init__(message)


class QueueFullError(ServiceError):
    """The server's queue is full: too many requests wait already."""


class RateLimitError(ServiceError):
    """The API key of the request has used up what it may. retry_after: seconds until it is worth trying again."""

    def __init__(self, message: str, *, retry_after: float):
        self.retry_after = retry_after
        super().__init__(message)


class DeadlineError(ServiceError):
    """The answer was not complete in the time that the request gave it."""


class SlowReaderError(ServiceError):
    """The client does not read its stream, and what waits for it has reached the bound."""
