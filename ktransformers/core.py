"""Host-side types that every layer shares. Knows neither torch nor transformers.

Who fills which field is noted on it. Lengths end in `_len` and are in tokens; times are in seconds.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum
from numbers import Integral, Real
from typing import Any

from ktransformers.errors import ConfigError, UnsupportedError

__all__ = [
    "CAPTURING",
    "COMPILING",
    "PROMPT_LOGPROB_ROWS",
    "RECOMMENDED_FIELDS",
    "SNAPSHOT_ALIGN",
    "AnswerEnd",
    "Constraint",
    "ConstraintKind",
    "FinishReason",
    "GenerationStats",
    "PastToken",
    "Phase",
    "Progress",
    "ReasoningSpec",
    "SamplingParams",
    "TokenEvent",
    "TokenLogprobs",
    "format_bytes",
]

CAPTURING = "CUDA graphs"
"""What a callback that reports on loading is given for a name while decode steps are captured on a GPU."""

COMPILING = "compiling kernels"
"""The same, while kernels for steps on a GPU are compiled, or read from the disk."""

Progress = Callable[[int, int, str], None]
"""Called while loading, from any thread, with (bytes loaded, bytes in all, dotted name of the module).

After it, while steps on a GPU are made ready, with (kernels, kernels in all, COMPILING) and (graphs captured, graphs in
all, CAPTURING).
"""

PROMPT_LOGPROB_ROWS = 64
"""Most prompt tokens of one request in one step when all their logits are wanted: 4 * vocab_size bytes each."""

SNAPSHOT_ALIGN = 64
"""States of recurrent layers are kept behind positions whose number is a multiple of this: there a GPU's chunks end."""

_REPR = reprlib.Repr()
_REPR.maxtuple = _REPR.maxlist = _REPR.maxdict = 8
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 60


def format_bytes(nbytes: int) -> str:
    """Format a number of bytes for people: GiB from one GiB on, MiB from one MiB, else KiB or B."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


class Phase(StrEnum):
    """The phase of a step, by which it uses one of an operator's two implementations."""

    PREFILL = "prefill"
    GENERATE = "generate"


class FinishReason(StrEnum):
    """The reason why an answer ended.

    STOP: an end token or a stop string; LENGTH: a token limit; ABORT: the caller left.
    """

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class Pooling(StrEnum):
    """The way an embedding is made of hidden states of a prompt's tokens: the first's, the last's, or their mean."""

    FIRST = "first"
    LAST = "last"
    MEAN = "mean"

    @property
    def needs_all(self) -> bool:
        """Whether pooling takes more than the hidden state of the last token, the only one that is always computed."""
        return self is not Pooling.LAST


@dataclass(frozen=True, slots=True)
class EmbeddingForm:
    """The form of a model's embeddings. Decoders that say nothing are pooled by their last token.

    pooling: None: in a way that is not known here. normalizes: whether vectors are scaled to length 1.
    """

    pooling: Pooling | None = Pooling.LAST
    normalizes: bool = True


_INF = float("inf")
_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
RECOMMENDED_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of SamplingParams that a model's authors may recommend, as generation_config.json calls them."""
_OPTIONAL_COUNTS = ("seed", "max_tokens", "logprobs", "prompt_logprobs", "max_drafts")


def _is_a(value: object, kind: type) -> bool:
    """Whether it is of this kind; numpy's numbers are numbers, True and False are none."""
    return isinstance(value, kind) and not isinstance(value, bool)


def _tuple_of(name: str, values: object, kind: type) -> tuple[Any, ...]:
    """The values as a tuple. Raises ConfigError."""
    made = tuple(values) if isinstance(values, Iterable) and not isinstance(values, (str, bytes, dict)) else None
    if made is None or not all(_is_a(value, kind) for value in made):
        raise ConfigError(f"{name} must be a list of {'strings' if kind is str else 'token ids'}, got {values!r:.40}")
    return made


_SHAPING_HINTS = ("disable_additional_properties", "whitespace_pattern")
"""Of vLLM's structured_outputs, what would make another answer."""


class ConstraintKind(StrEnum):
    """The language of a constraint's text. CHOICE: a JSON list of strings. GRAMMAR: Lark as llguidance has it, or GBNF.

    TOOL_CALLS: Lark too, written here for a request's tools (`Tokenizer.tool_grammar`); no request says it itself.
    """

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    TOOL_CALLS = "tool_calls"


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint: what an answer, its reasoning excepted, must look like from its first character to its last.

    exit_ids: an answer that begins with one of these tokens is free: it calls a tool. widened: parts of the request's
    schema that `text` does not hold answers to, for whoever tells the client.
    """

    kind: ConstraintKind
    text: str = ""
    exit_ids: tuple[int, ...] = ()
    widened: tuple[str, ...] = ()

    @classmethod
    def of(cls, wanted: object) -> Constraint:
        """Make a constraint of what vLLM calls structured_outputs: a dict or an object.

        It has one of json (a schema), regex, choice, grammar, json_object. Raises ConfigError; UnsupportedError for a
        hint that would change the answer.
        """
        kinds = {kind.value for kind in ConstraintKind} - {ConstraintKind.TOOL_CALLS.value}
        if not isinstance(wanted, Mapping):
            wanted = {name: getattr(wanted, name, None) for name in (*kinds, *_SHAPING_HINTS)}
        for name in _SHAPING_HINTS:
            if wanted.get(name):
                raise UnsupportedError(f"{name} is not supported: leave it out")
        others = (*_SHAPING_HINTS, "disable_fallback", "disable_any_whitespace")  # the last is what is done here
        asked = {name: value for name, value in wanted.items() if name not in others}
        given = [name for name, value in asked.items() if value is not None and value is not False]
        if len(given) != 1 or given[0] not in kinds:
            raise ConfigError(f"a constraint has exactly one of {', '.join(sorted(kinds))}, got {sorted(given)!r:.80}")
        kind, value = ConstraintKind(given[0]), wanted[given[0]]
        if kind is ConstraintKind.JSON_OBJECT:
            return cls(kind)
        if kind is ConstraintKind.CHOICE:
            choices = _tuple_of("choice", value, str)
            if not choices:
                raise ConfigError("choice must not be empty")
            return cls(kind, json.dumps(choices))
        if kind is ConstraintKind.JSON_SCHEMA and isinstance(value, Mapping):
            return cls(kind, _as_json(value))
        if not isinstance(value, str):
            raise ConfigError(f"{kind} must be text{', or a dict' if kind is ConstraintKind.JSON_SCHEMA else ''}")
        return cls(kind, value)


def _as_json(value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"the JSON schema is no JSON: {error}") from error


@dataclass(frozen=True, slots=True)
class ReasoningSpec:
    """The marks by which an answer's reasoning is told from what follows it, for rules that are about one of them.

    end: a regular expression, what of its text ends it. closing: the text that is written to end it from outside; it
    ends with what `end` finds. is_open: the prompt ends inside of it. open_id: the token that opens it at the beginning
    of an answer; None: an answer opens none. drops_breaks: line breaks behind the end belong to it. max_tokens: how
    long it may get before it is ended from outside; None: as long as it likes.
    """

    end: str
    closing: str
    is_open: bool = False
    open_id: int | None = None
    drops_breaks: bool = False
    max_tokens: int | None = None


_CONSTRAINT_NAMES = {
    "structured_outputs": "",
    "guided_decoding": "",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's names for a constraint, and what of it they are."""


@dataclass(frozen=True, slots=True, repr=False)
class SamplingParams:
    """The parameters of choosing the next token. The meaning of each field is OpenAI's or vLLM's of the same name.

    temperature 0 is greedy and makes top_k, top_p, min_p and seed irrelevant. top_k 0 and -1 mean "all".
    seed None draws one from the operating system, which is reported with the result.
    logprobs, prompt_logprobs: how many alternatives to report per token of the answer, of the prompt; None: nothing.
    allowed_token_ids: all other tokens are impossible, the end token too; None: no limit.
    pooling: the first token comes with an embedding of the prompt.
    min_tokens: the answer's end tokens and stop_token_ids are impossible before; stop strings are not looked at either.
    include_stop_str_in_output: the text ends with the stop string that ended it.
    skip_special_tokens: control tokens have no text.
    constraint: what the answer must look like; also a dict as vLLM's structured_outputs: {"json": schema}. End tokens
    come where it is complete; with ignore_eos only where nothing else may come, and then they end the answer.
    reasoning: where the constraint begins, and how long reasoning may get; None: the answer has none.
    max_drafts: most draft tokens of the answer in a step (scheduler/drafting); None: as many as the engine has it; 0:
    none. It changes no answer.
    n: how many answers LLM and AsyncLLM give to each prompt; answer i draws with seed + i.
    structured_outputs, guided_decoding and the rest are vLLM's names for a constraint, of which they are one; they are
    None once they are read.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    max_tokens: int | None = None  # None: until the cache is full
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    pooling: Pooling | None = None
    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None
    reasoning: ReasoningSpec | None = None
    max_drafts: int | None = None
    n: int = 1
    structured_outputs: Any = None
    guided_decoding: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def __post_init__(self) -> None:
        self._read_constraint()
        # A string is a sequence of letters, and a list of strings is what people write: both mean a tuple here.
        stop: object = self.stop
        object.__setattr__(self, "stop", _tuple_of("stop", (stop,) if isinstance(stop, str) else stop, str))
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _tuple_of(name, getattr(self, name), Integral))
        if self.pooling is not None and not isinstance(self.pooling, Pooling):
            raise ConfigError(f"pooling must be None or a Pooling, got {self.pooling!r:.40}")
        self._check_types()
        checks = (
            (0.0 <= self.temperature < _INF, f"temperature must be at least 0, got {self.temperature}"),
            (-1 <= self.top_k < 1 << 31, f"top_k must be -1, 0 (both: all) or positive, got {self.top_k}"),
            (0.0 < self.top_p <= 1.0, f"top_p must be in (0, 1], got {self.top_p}"),
            (0.0 <= self.min_p <= 1.0, f"min_p must be in [0, 1], got {self.min_p}"),
            (
                self.seed is None or -(1 << 63) <= self.seed < 1 << 64,
                f"seed must fit 64 bits, got {self.seed}",
            ),
            (
                0.0 < self.repetition_penalty < _INF,
                f"repetition_penalty must be positive, got {self.repetition_penalty}",
            ),
            (
                -2.0 <= self.frequency_penalty <= 2.0,
                f"frequency_penalty must be in [-2, 2], got {self.frequency_penalty}",
            ),
            (-2.0 <= self.presence_penalty <= 2.0, f"presence_penalty must be in [-2, 2], got {self.presence_penalty}"),
            (self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1, got {self.max_tokens}"),
            (
                self.min_tokens >= 0 and (self.max_tokens is None or self.min_tokens <= self.max_tokens),
                f"min_tokens must be at least 0 and at most max_tokens, got {self.min_tokens}",
            ),
            (self.logprobs is None or 0 <= self.logprobs <= 20, f"logprobs must be in [0, 20], got {self.logprobs}"),
            (
                self.prompt_logprobs is None or 0 <= self.prompt_logprobs <= 20,
                f"prompt_logprobs must be in [0, 20], got {self.prompt_logprobs}",
            ),
            (
                self.max_drafts is None or 0 <= self.max_drafts < 1 << 31,
                f"max_drafts must be at least 0, got {self.max_drafts}",
            ),
            (self.n >= 1, f"n must be at least 1, got {self.n}"),
            (self.allowed_token_ids is None or self.allowed_token_ids, "allowed_token_ids must not be empty"),
            (all(self.stop), "stop strings must not be empty"),
        )
        for is_valid, message in checks:
            if not is_valid:  # also catches NaN, which fails every comparison
                raise ConfigError(message)

    def __repr__(self) -> str:
        """Return the fields that differ from the defaults, long collections shortened."""
        changed = []
        for one in fields(self):
            value = getattr(self, one.name)
            default = {} if one.default is MISSING else one.default
            if value != default:
                changed.append(f"{one.name}={_REPR.repr(value)}")
        return f"SamplingParams({', '.join(changed)})"

    def _read_constraint(self) -> None:
        names = ("constraint", *_CONSTRAINT_NAMES)
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both say what the answer must look like: give one of them")
        for name, wanted in given.items():
            if name == "constraint" and not isinstance(wanted, Constraint | Mapping):
                raise ConfigError(f"constraint must be a Constraint or a dict, got {wanted!r:.40}")
            kind = _CONSTRAINT_NAMES.get(name)
            try:
                made = wanted if isinstance(wanted, Constraint) else Constraint.of({kind: wanted} if kind else wanted)
            except ConfigError as error:
                raise type(error)(f"{name}: {error}") from error
            object.__setattr__(self, name, None)
            object.__setattr__(self, "constraint", made)

    def _check_types(self) -> None:
        for name in _REALS:
            if not _is_a(getattr(self, name), Real):
                raise ConfigError(f"{name} must be a number, got {getattr(self, name)!r:.40}")
        for name in ("top_k", "min_tokens", "n", *_OPTIONAL_COUNTS):
            value = getattr(self, name)
            if not _is_a(value, Integral) and (value is not None or name in ("top_k", "min_tokens", "n")):
                raise ConfigError(f"{name} must be a whole number, got {value!r:.40}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, got {getattr(self, name)!r:.40}")
        bias = self.logit_bias
        if not isinstance(bias, dict) or not all(_is_a(k, Integral) and _is_a(v, Real) for k, v in bias.items()):
            raise ConfigError("logit_bias must be a dict from token ids to numbers")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The limits by which an answer ends by its tokens alone. end_ids: tokens that end it.

    max_len: most tokens that it has.
    """

    end_ids: frozenset[int]
    max_len: int

    @classmethod
    def of(cls, params: SamplingParams, eos_token_ids: Iterable[int], room: int) -> AnswerEnd:
        """Make the limits of an answer by its parameters. room: tokens that fit behind the prompt."""
        ignores_eos = params.ignore_eos and params.constraint is None
        end_ids = frozenset(params.stop_token_ids) | frozenset(() if ignores_eos else eos_token_ids)
        return cls(end_ids, room if params.max_tokens is None else min(params.max_tokens, room))

    def reason(self, token_id: int, completion_len: int) -> FinishReason | None:
        """Return why the answer ends with this token, the completion_len-th, or None."""
        if token_id in self.end_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if completion_len >= self.max_len else None


@dataclass(slots=True)
class GenerationStats:
    """The counts and times of one answer, filled by the generate loop as it goes."""

    prompt_len: int = 0
    cached_len: int = 0  # leading prompt tokens whose K/V were already in the cache
    completion_len: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_drafted: int = 0  # draft tokens that were run (scheduler/drafting)
    num_accepted: int = 0  # those of them that are the answer's

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens computed per second (those found in the cache do not count)."""
        return (self.prompt_len - self.cached_len) / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def num_rejected(self) -> int:
        """Draft tokens that were run and are not the answer's."""
        return self.num_drafted - self.num_accepted

    @property
    def decode_rate(self) -> float:
        """Tokens generated per second after the first, which the prefill gives."""
        steps = max(self.completion_len - 1, 0)
        return steps / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithms of raw probabilities: of the chosen token, and of the most likely ones, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """An event of one step of an answer: its token, and the text that this makes certain.

    token_id: the new token; None only in the last event of an answer that was aborted.
    text: what became certain of the answer's text; can lag behind the tokens (unfinished characters, stop strings).
    finish_reason: set in the last event and only there. stop: the stop string, or the id of the end token, behind STOP.
    stats: the same object in every event, filled as the answer goes on.
    prompt_logprobs: in the first event, when asked for: one entry per prompt token, None for the first.
    embedding: in the first event, when pooling is asked for: fp32 [H], little-endian, as the model has it.
    """

    token_id: int | None
    text: str
    stats: GenerationStats
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class PastToken:
    """A token of an answer that another process has begun, with what its event was made of.

    index: of the answer, among those of its request. cached_len: of its prompt. reason: as AnswerEnd knows it.
    """

    index: int
    token_id: int
    cached_len: int
    logprobs: TokenLogprobs | None = None
    reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

    @classmethod
    def of(cls, index: int, event: TokenEvent) -> PastToken | None:
        """Return the past token of an event, None for one without a token.

        A stop string is found again when the text is made again.
        """
        if event.token_id is None:
            return None
        # Where the limit fell on the token that completed a stop string, that was looked for before and behind it.
        reason = FinishReason.LENGTH if isinstance(event.stop, str) else event.finish_reason
        return cls(index, event.token_id, event.stats.cached_len, event.logprobs, reason, event.prompt_logprobs)
