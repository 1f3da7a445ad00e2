"""The figures of a wave: rows of the table and of the JSON record. Pure: made of answers that are there."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from ktransformers.bench.agents.load import GroupTurn, TimedAnswer
from ktransformers.bench.agents.shapes import Wave
from ktransformers.bench.common.report import Column, Row

__all__ = ["COLUMNS", "label", "percentile", "row_of", "shown_host", "shown_row"]

COLUMNS = (
    Column("label", 16, title="wave"),
    Column("requests", 4, title="N"),
    Column("errors", 6),
    Column("seconds", 8, ".2f", "s"),
    Column("first", 15, title="first med/max s"),
    Column("gap", 20, title="gap med/p99/max ms"),
    Column("prompt_tokens", 7, title="prompt"),
    Column("cached_tokens", 7, title="cached"),
    Column("prompt_tokens_per_s", 10, ".0f", "prompt t/s"),
    Column("output_tokens_per_s", 7, ".1f", "out t/s"),
)


def row_of(server: str, wave: Wave, turn: GroupTurn) -> Row:
    """Return the figures of one turn, in JSON types; None where there is nothing to measure.

    Lengths and tokens/s are sums over all answers without an error. Tokens/s are over the whole turn's seconds; of a
    prompt those count that the server computed, or all where it does not say what it had cached.
    """
    good = [answer for answer in turn.answers if not answer.error]
    gaps = sorted(1e3 * gap for answer in good for gap in answer.gaps)
    firsts = [answer.first for answer in good]
    prompt_len, answer_len = sum(one.prompt_len for one in good), sum(one.answer_len for one in good)
    cached_len = _cached(good)
    return {
        "server": server,
        "wave": wave.name,
        "group": turn.group.name,
        "turn": turn.number,
        "requests": len(turn.answers),
        "errors": len(turn.answers) - len(good),
        "seconds": round(turn.seconds, 4),
        "first_median_s": round(statistics.median(firsts), 4) if firsts else None,
        "first_max_s": round(max(firsts), 4) if firsts else None,
        "gap_median_ms": round(statistics.median(gaps), 3) if gaps else None,
        "gap_p99_ms": round(percentile(gaps, 99), 3) if gaps else None,
        "gap_max_ms": round(gaps[-1], 3) if gaps else None,
        "prompt_tokens": prompt_len,
        "cached_tokens": cached_len,
        "output_tokens": answer_len,
        "prompt_tokens_per_s": _rate(prompt_len - (cached_len or 0), turn.seconds),
        "output_tokens_per_s": _rate(answer_len, turn.seconds),
    }


def _cached(answers: Sequence[TimedAnswer]) -> int | None:
    """Cached tokens of all prompts. None when no answer says so; vLLM leaves out those that had none."""
    said = [answer.cached_len for answer in answers if answer.cached_len is not None]
    return sum(said) if said else None


def _rate(tokens: int, seconds: float) -> float | None:
    return round(tokens / seconds, 2) if seconds else None


def percentile(ordered: Sequence[float], share: int) -> float:
    """Return the value that `share` percent of these, ascending, stay below, or the last."""
    return ordered[min(share * len(ordered) // 100, len(ordered) - 1)]


def label(row: Row) -> str:
    """Return the table's name for a row: wave/group, and the turn where it is not the first."""
    name = f"{row['wave']}/{row['group']}" if row["group"] else row["wave"]
    return f"{name} {row['turn']}." if row["turn"] > 1 else str(name)


def shown_row(row: Row) -> dict[str, object]:
    """Return the columns of a row that only the table has."""
    keys = ("first_median_s", "first_max_s")
    gap_keys = ("gap_median_ms", "gap_p99_ms", "gap_max_ms")
    return {"label": label(row), "first": _shown(row, keys, ".2f"), "gap": _shown(row, gap_keys, ".1f")}


def _shown(row: Row, keys: Sequence[str], spec: str) -> str | None:
    values = [row[key] for key in keys]
    return None if None in values else "/".join(format(value, spec) for value in values)


def shown_host(machine: dict[str, Any]) -> str:
    """Return bench.common.machine.describe_machine as a line."""
    gpus = [gpu["name"] for gpu in machine.get("gpus", ())]
    counted = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    return ", ".join([f"{machine['cpu']}, {machine['cores']} cores", *counted])
