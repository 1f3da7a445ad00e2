"""Where the time of a step goes: what engine and scheduler record, and the process that writes it down.

    engine ── StepRecord, native records ──┐
                                           ├─ Recorder ── ZMQ ──> bridge process ── Joiner ── ProfileFiles ──> DIR
    scheduler ── TokensRecord, ... ────────┘

A process of its own, because joining and JSON in Python would take the engine's GIL, and because what it has been given
survives an engine that dies. docs/profiling.md has the form of the files.
"""
