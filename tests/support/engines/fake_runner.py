"""Models without weights: functions from the tokens of a sequence to logits, strict about the runner's contract."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from ktransformers.cache.paged import PagedCache
from ktransformers.config import EngineConfig
from ktransformers.engine.load.reference import ReferenceExecutor
from ktransformers.engine.model.opened import ModelDescription
from ktransformers.engine.step.context import ForwardBatch
from ktransformers.engine.step.hot import HotService
from ktransformers.media.records import is_media_id
from ktransformers.scheduler.config import SchedulerConfig
from ktransformers.tokenizer import Tokenizer

NextLogits = Callable[[list[int]], np.ndarray]
"""fp32 logits [V] of the token that follows a sequence."""


class FakeRunner:
    """Keeps the written tokens, calls `next_logits` on each kept prefix, and refuses what a real runner refuses."""

    def __init__(self, next_logits: NextLogits, vocab_size: int, max_len: int):
        self._next_logits = next_logits
        self.vocab_size, self.max_len = vocab_size, max_len
        self.written: list[int] = []
        self.calls: list[tuple[int, int, int]] = []  # start, tokens, rows kept
        self.fails_at: int | None = None  # call number
        self.is_models_limit = False

    @property
    def num_forwarded(self) -> int:
        return sum(count for _, count, _ in self.calls)

    def resume_len(self, shared: int) -> int:
        return shared

    def forward(self, token_ids: Sequence[int], start: int, keep: Sequence[int]) -> torch.Tensor:
        assert 0 <= start <= len(self.written), f"start {start} leaves a gap after {len(self.written)} positions"
        assert token_ids, "a step without tokens"
        assert start + len(token_ids) <= self.max_len
        assert all(0 <= token < self.vocab_size or is_media_id(token) for token in token_ids)
        assert all(0 <= row < len(token_ids) for row in keep)
        del self.written[start:]
        self.calls.append((start, len(token_ids), len(keep)))
        if self.fails_at == len(self.calls):
            raise RuntimeError("the fake fails here")
        self.written += token_ids
        rows = [self._next_logits(self.written[: start + row + 1]) for row in keep]
        return torch.from_numpy(np.stack(rows)) if rows else torch.empty(0, self.vocab_size)

    def decode(self, token_id: int, position: int, need: int) -> torch.Tensor:
        return self.forward([token_id], position, [0])


def ngram_logits(vocab_size: int, order: int = 3) -> NextLogits:
    """A language model of hashed n-grams."""

    def logits(prefix: list[int]) -> np.ndarray:
        seed = zlib.crc32(np.array(prefix[-order:], dtype=np.int64).tobytes())
        return np.random.default_rng(seed).normal(0, 3, vocab_size).astype(np.float32)

    return logits


THINK = "<think>\n"


def scripted_logits(tokenizer: Tokenizer, reply: Callable[[str], str]) -> NextLogits:
    """Answers each prompt with `reply(prompt text)`, after the last "<|im_start|>assistant" header; then <|im_end|>."""
    header = tokenizer.encode("<|im_start|>assistant\n")
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    think = tokenizer.encode(THINK)

    @functools.cache
    def said(prompt: tuple[int, ...]) -> list[int]:
        return tokenizer.encode(reply(tokenizer.decode(prompt, skip_special_tokens=False)))

    def logits(prefix: list[int]) -> np.ndarray:
        starts = [i for i in range(len(prefix)) if prefix[i] == header[0] and prefix[i : i + len(header)] == header]
        values = np.zeros(tokenizer.vocab_size, dtype=np.float32)
        answered = prefix[starts[-1] + len(header) :] if starts else []
        if answered[: len(think)] == think and said(tuple(prefix[: starts[-1] + len(header)]))[: len(think)] != think:
            answered = answered[len(think) :]  # the prompt goes on: the tag was forced
        prompt = prefix[: len(prefix) - len(answered)]
        wanted = said(tuple(prompt))
        at = len(answered)
        if wanted[:at] != answered:
            at = next((i for i in range(min(at, len(wanted))) if answered[i] != wanted[i]), at)
        values[wanted[at] if at < len(wanted) else end] = 20.0
        return values

    return logits


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """One token per byte, and the special tokens of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = RustTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in ("<think>", "</think>")])
    backend = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    return Tokenizer(backend)


class _Steps:
    """A FakeRunner as an executor runs it. prefix: see ReferenceRunner."""

    begins_ahead = runs_apart = False
    held_steps = None
    meanwhile: Any = None

    def __init__(self, runner: FakeRunner):
        self.runner, self.prefix = runner, list[int]()

    def begin(self, *_: object) -> None:
        raise AssertionError("there is no stage before this one")

    @property
    def hook(self) -> Any:
        raise AssertionError("the fake has no hidden states")

    def reduced_step(self, batch: ForwardBatch, needs: Any) -> torch.Tensor:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        shared = 0
        while shared < min(len(self.prefix), len(self.runner.written)):
            if self.prefix[shared] != self.runner.written[shared]:
                break
            shared += 1
        if shared < len(self.prefix):  # in a page that the cache still has, the fake has not
            self.runner.forward(self.prefix[shared:], shared, [])
            self.runner.calls.pop()
        return self.runner.forward(batch.token_ids.tolist(), len(self.prefix), batch.keep.tolist())


class FakeEngine:
    """A LoadedModel over a FakeRunner, for one sequence at a time. Its cache has the whole pages of the runner's
    max_len."""

    identity: Any = None
    tiers = None
    pictures: Any = "a tower"  # for models whose files speak of pictures

    def __init__(self, runner: FakeRunner, tokenizer: Tokenizer, *, page_size: int = 16, **config: Any):
        self.runner, self.tokenizer, self.description = runner, tokenizer, "fake"
        self.config = replace(EngineConfig(chunk_size=16, max_new_tokens=200), **config)
        self.facts: Any = SimpleNamespace(architecture=None, model_type="fake")
        self.model = ModelDescription(
            tokenizer=tokenizer,
            vocab_size=runner.vocab_size,
            context_len=None,
            eos_token_ids=tokenizer.eos_token_ids,
            generation_defaults={},
            architecture=None,
            description="fake",
        )
        self.hot, self.is_closed, self.page_size = HotService(), False, page_size
        self.expert_files = None
        self.cache = PagedCache((), runner.max_len // self.page_size, self.page_size)
        self.executor = ReferenceExecutor(_Steps(runner), self.cache, self.model)  # type: ignore[arg-type]

    @property
    def scheduler_config(self) -> SchedulerConfig:
        return SchedulerConfig(
            num_pages=self.cache.num_pages,
            page_size=self.page_size,
            chunk_size=self.config.chunk_size,
            max_batch_size=1,
            vocab_size=self.model.vocab_size,
            eos_token_ids=self.model.eos_token_ids,
            has_prefix_cache=self.config.prefix_cache,
        )

    def close(self) -> None:
        self.executor.close()
        self.is_closed = True


def scripted_engine(
    reply: Callable[[str], str], max_len: int = 4096, template: str | None = CHAT_TEMPLATE, **config: Any
) -> FakeEngine:
    tokenizer = byte_tokenizer(template)
    runner = FakeRunner(scripted_logits(tokenizer, reply), tokenizer.vocab_size, max_len)
    return FakeEngine(runner, tokenizer, **config)
