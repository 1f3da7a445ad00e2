"""Ourselves with --hot_experts off as a peer, in a process of its own: whole layers in place of slots for experts.

Questions are `prefill TOKENS` and `decode SEQUENCES`, answers tokens per second, measured as `bench offline` does.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.peers.base import PeerProcess, answer_questions
from ktransformers.bench.offline.measure import load_work
from ktransformers.cli.bench.offline import add_offline_flags, offline_work
from ktransformers.cli.bench.options import measuring_group

__all__ = ["WHOLE_LAYERS", "figures", "whole_layers_peer"]

WHOLE_LAYERS = "whole_layers"


def whole_layers_peer(argv: Sequence[str]) -> PeerProcess:
    """Start the child, which loads the model that the flags `argv` of `bench offline` name."""
    return PeerProcess(WHOLE_LAYERS, [sys.executable, "-m", "benchmarks.peers.whole_layers", *argv])


def figures(argv: Sequence[str]) -> Callable[[list[str]], float | None]:
    """Load the model, and return what answers a question's words. Raises what loading does."""
    parser = argparse.ArgumentParser()
    add_offline_flags(parser, measuring_group(parser, lambda args: 0))
    work = offline_work(parser.parse_args(list(argv)))
    runs = load_work(replace(work, config=replace(work.config, hot_experts="off"), stream=None))

    def answer(words: list[str]) -> float | None:
        phase, count = words[0], int(words[1])
        figure = runs.prefill(count) if phase == "prefill" else runs.decode(count, work.cases[0])
        return figure.tokens_per_s

    return answer


if __name__ == "__main__":
    answer_questions(figures(sys.argv[1:]))
