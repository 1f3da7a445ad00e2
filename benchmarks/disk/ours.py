"""Ours as a child process under a limit of memory: answers `prefill TOKENS` and `decode SEQUENCES` with tokens/s.

Token ids are those that the peer llama.cpp draws for the same questions in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.disk.options import OURS, disk_parser, disk_work
from benchmarks.model import PAGE_SIZE, OurSteps, num_slots
from benchmarks.peers.base import PeerProcess, answer_questions
from ktransformers.cli.parsing.options import set_up_logging
from ktransformers.engine.load.builder import build_engine

__all__ = ["start_ours"]


def start_ours(argv: Sequence[str], within: Callable[..., list[str]]) -> PeerProcess:
    """Start the child, with the flags `argv` of `benchmarks.disk`, by a command line that `within` makes of its own."""
    return PeerProcess(OURS, within(sys.executable, "-m", "benchmarks.disk.ours", *argv))


def _answers(argv: Sequence[str]) -> Callable[[list[str]], float | None]:
    """Load the model, and return what answers a question's words."""
    set_up_logging("warning")
    given = disk_work(disk_parser(lambda args: 0).parse_args(list(argv)))
    config = replace(given.config, cache_lens=given.config.cache_lens or num_slots(given.work)).resolved()
    engine = build_engine(config, page_size=PAGE_SIZE, max_batch_size=1)
    steps = OurSteps(engine, engine.model.vocab_size)
    return lambda words: steps.measure(words[0], int(words[1]), given.work).rate


if __name__ == "__main__":
    answer_questions(_answers(sys.argv[1:]))
