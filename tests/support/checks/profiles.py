"""Profiles read back by nothing of ours but JSON, and what has to hold of every one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class ReadProfile:
    meta: dict[str, Any]
    steps: list[dict[str, Any]]
    tokens: list[dict[str, Any]]
    requests: list[dict[str, Any]]

    def answers(self) -> dict[str, list[int]]:
        """The tokens of each request in order, each index exactly once."""
        found: dict[str, dict[int, int]] = {}
        for line in self.tokens:
            known = found.setdefault(line["request"], {})
            assert line["index"] not in known, line
            known[line["index"]] = line["token"]
        assert all(sorted(known) == list(range(len(known))) for known in found.values())
        return {request: [known[index] for index in sorted(known)] for request, known in found.items()}


def read_profile(folder: Path) -> ReadProfile:
    """Every line must be whole."""
    assert folder.stat().st_mode & 0o777 == 0o700
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in folder.iterdir())
    meta = json.loads((folder / "meta.json").read_text())
    assert (meta["v"], meta["schema"]) == (1, "ktransformers-profile")
    steps, tokens, requests = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("steps", "tokens", "requests")
    )
    assert all(line["v"] == 1 for line in (*steps, *tokens, *requests))
    return ReadProfile(meta, steps, tokens, requests)


def check_sums(profile: ReadProfile) -> None:
    """Parts add up to the step's wall time. They are rounded to a tenth of a microsecond each."""
    assert profile.steps
    assert profile.meta["overlaps"] == 0
    for step in profile.steps:
        assert sum(step["parts_us"].values()) == pytest.approx(1000 * step["ms"], rel=0.05, abs=2)
        assert step["parts_us"]["host"] >= 0


def check_answers(profile: ReadProfile, answers: Mapping[str, Sequence[int]]) -> None:
    """Every token of the answers has its line, exactly once, and every request its own."""
    assert profile.answers() == {request: list(tokens) for request, tokens in answers.items() if tokens}
    ended = {line["request"]: line["completion_len"] for line in profile.requests}
    assert len(ended) == len(profile.requests)
    assert ended == {request: len(tokens) for request, tokens in answers.items()}


def check_nothing_lost(profile: ReadProfile) -> None:
    """Not a record, and every token knows its step."""
    assert set(profile.meta["dropped"].values()) == {0}, profile.meta["dropped"]
    assert profile.meta["stopped_unix_ns"] is not None
    steps = {step["step"]: step for step in profile.steps}
    assert len(steps) == len(profile.steps)
    for token in profile.tokens:
        step = steps[token["step"]]
        assert (token["step_ms"], token["batch"]) == (step["ms"], step["rows"])
        assert token["t"] == pytest.approx(step["t"] + step["ms"] / 1000, abs=1e-5)
