"""The profile of where a step's time goes: recording by engine and scheduler, the process that writes it, and reading.

    engine ── StepRecord, native records ──┐
                                           ├─ Recorder ── ZMQ ──> bridge process ── Joiner ── ProfileFiles ──> DIR
    scheduler ── TokensRecord, ... ────────┘                                                                  │
                                                            tables, report, trace, compare <── load(DIR) ─────┘

A process of its own, because joining and JSON in Python would take the engine's GIL, and because what it has been given
survives an engine that dies. docs/profiling.md has the form of the files, `report` draws pages of
them. Does not know models or requests' texts: it receives names of parts, ids and times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ktransformers.profiling.tables import Profile, Table, load

__all__ = ["Profile", "Table", "load"]


def __getattr__(name: str) -> Any:
    """Import what reads profiles on first use: processes that write import neither numpy nor files."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ktransformers.profiling import tables

    return getattr(tables, name)
