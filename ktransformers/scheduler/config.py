"""The limits that the scheduler works within. Does not know models: whoever builds it resolves these numbers."""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.cache.tiers import PAGE
from ktransformers.core import SNAPSHOT_ALIGN
from ktransformers.errors import ConfigError
from ktransformers.media.records import Sight
from ktransformers.scheduler.limits import Limits

__all__ = [
    "MAX_DRAFT_STATES",
    "MAX_GAP_MS",
    "MAX_ITL_RATIO",
    "SchedulerConfig",
    "TierConfig",
    "check_itl_ratio",
    "check_max_gap",
]


@dataclass(frozen=True, slots=True)
class TierConfig:
    """The tiers below the cache, see cache/tiers.py.

    fingerprint: of the model, 32 bytes; kv_type: of its keys and values; both decide what a page is called.
    host_pages, host_states: slots in host memory, of page_bytes and state_bytes. disk_bytes: of files together, of
    page_file_bytes and state_file_bytes each; 0: there are none.
    """

    fingerprint: bytes
    host_pages: int
    page_bytes: int
    page_file_bytes: int = 0
    host_states: int = 0
    state_bytes: int = 0
    state_file_bytes: int = 0
    disk_bytes: int = 0
    kv_type: str = "auto"

    def file_bytes(self, kind: bytes) -> int:
        """Bytes of a file of this kind."""
        return self.page_file_bytes if kind == PAGE else self.state_file_bytes


MAX_ITL_RATIO = 2.0
"""What balance_serve takes where nobody says: prompts wait longer then, and streams at most twice as long."""


def check_itl_ratio(ratio: float) -> None:
    """Raise ConfigError for a number that --max_itl_ratio cannot be."""
    if ratio != 0 and not 1 < ratio < float("inf"):
        raise ConfigError(f"--max_itl_ratio must be more than 1, or 0 for no limit, got {ratio}")


MAX_DRAFT_STATES = 4
"""Slots for states of recurrent layers in front of draft tokens: a state may be as large as thousands of positions."""

MAX_GAP_MS = 500.0
"""What balance_serve takes where nobody says: the longest pause of a stream for the sake of prompts."""


def check_max_gap(milliseconds: float) -> None:
    """Raise ConfigError for a number that --max_gap_ms cannot be."""
    if not 0 <= milliseconds < float("inf"):
        raise ConfigError(f"--max_gap_ms must be a number of milliseconds, or 0 for no limit, got {milliseconds:g}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The scheduler's limits, checked on creation; raises ConfigError.

    num_pages, page_size: the K/V cache, in pages and in tokens per page.
    chunk_size: most tokens one step carries, decodes and prefill together.
    long_chunk_size, long_prompt: tokens of a step while at least so many tokens of prompts wait, on memory that the
    engine lends for it (scheduler/long_prompts.py); 0: there is none.
    max_batch_size: most sequences one step carries.
    max_itl_ratio: beside prompts, streams are at most so many times slower than alone over any two seconds, as far as
    scheduler/prefill_throttle.py can have it; 0: chunk_size alone decides. max_gap_ms: milliseconds that a step which
    carries prompts beside decodes may last; 0: no limit.
    vocab_size: token ids are 0 .. vocab_size - 1. A prompt with others would kill the engine again and again, but for
    num_extra_ids ones behind them, which no answer has.
    eos_token_ids: end every answer whose request does not say ignore_eos.
    max_model_len: most tokens of one sequence that the model can do; None: as many as the cache holds.
    has_prefix_cache: whether sequences share pages.
    num_states: slots for states of recurrent layers, those of running sequences and snapshots; 0: there are no such
    layers. snapshot_interval: tokens between snapshots inside of a prompt, 0 for none; snapshot_align: all are taken
    behind multiples of it.
    tiers: where pages go besides; None: they are forgotten when the cache needs room.
    max_drafts: most draft tokens of a row, see scheduler/drafting; 0: none. drafter: what finds them: "ngram", the
    scheduler itself, in the text; else the engine, by a model that this is the name of. drafts_in_block: whether the
    engine makes all draft tokens of a step in one pass.
    picture_sight: what positions of pictures see behind themselves, which one step has to compute with them.
    num_stages: processes that steps pass one after another. With several, as many steps are under way, each with a
    share of the sequences.
    """

    num_pages: int
    page_size: int
    chunk_size: int
    max_batch_size: int
    vocab_size: int
    eos_token_ids: tuple[int, ...] = ()
    max_model_len: int | None = None
    has_prefix_cache: bool = True
    num_states: int = 0
    snapshot_interval: int = 0
    snapshot_align: int = SNAPSHOT_ALIGN
    tiers: TierConfig | None = None
    max_itl_ratio: float = 0.0
    max_gap_ms: float = 0.0
    num_stages: int = 1
    max_drafts: int = 0
    drafter: str = "ngram"
    drafts_in_block: bool = False
    long_chunk_size: int = 0
    long_prompt: int = 0
    picture_sight: Sight = Sight.NOTHING
    num_extra_ids: int = 0

    def __post_init__(self) -> None:
        positive = ("num_pages", "page_size", "chunk_size", "max_batch_size", "vocab_size", "snapshot_align")
        for name in (*positive, "num_stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_states", "snapshot_interval", "max_drafts", "long_chunk_size", "long_prompt"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        check_itl_ratio(self.max_itl_ratio)
        check_max_gap(self.max_gap_ms)
        if self.max_len < 2:
            raise ConfigError(
                f"a sequence may have {self.max_len} tokens, which leaves no room for a prompt and an answer; "
                "start with a larger --cache_lens"
            )

    @property
    def drafts_in_engine(self) -> bool:
        """Whether the engine finds draft tokens."""
        return self.drafter != "ngram"

    @property
    def max_in_flight(self) -> int:
        """Number of steps that are planned and not committed at most: one for each stage, and the next is ready."""
        return self.num_stages + 1

    @property
    def num_draft_states(self) -> int:
        """Number of slots for states in front of draft tokens, of all sequences together."""
        return min(self.max_drafts, MAX_DRAFT_STATES, max(self.num_states - self.max_running, 0))

    @property
    def total_len(self) -> int:
        """Number of tokens that the cache holds, all sequences together."""
        return self.num_pages * self.page_size

    @property
    def max_len(self) -> int:
        """The most tokens of one sequence, prompt and answer together."""
        return self.total_len if self.max_model_len is None else min(self.total_len, self.max_model_len)

    @property
    def limits(self) -> Limits:
        """The limits of a request, as far as ids and counts go."""
        return Limits(
            max_len=self.max_len,
            vocab_size=self.vocab_size,
            num_extra_ids=self.num_extra_ids,
            is_models_limit=self.max_len == self.max_model_len,
            max_picture_len=self.chunk_size,
            picture_sight=self.picture_sight,
        )

    @property
    def max_running(self) -> int:
        """The most sequences that hold pages at once.

        Not more than chunk_size: decodes go first, so with more of them than a step has tokens the last ones, and every
        prefill, would wait for as long as the others talk. This way a prefill gets at least one token of every step.
        """
        most = min(self.max_batch_size, self.chunk_size)
        return min(most, self.num_states) if self.num_states else most
