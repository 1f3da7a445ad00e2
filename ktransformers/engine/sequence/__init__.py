"""A sequence: its prompt and parameters, its tokens, its outputs, and its session on disk.

`prompts.py`, `keywords.py` and `outputs.py` are what callers give and get; `session.py` keeps the tokens whose keys
and values are cached, and `generate.py` an answer that can be left before any forward and gone on with;
`output_processor.py` says what a token means (text, stop strings, reasons), here and in balance_serve; `profiled.py`
records.

    Session ───┐                                                              ┌─> Session
               ├─ Kept ── write_session ── FILE.safetensors ── open_session ──┤
    BatchLoop ─┘                                                              └─> BatchLoop

What a cache keeps has names (`PagedCache.tensors`, `StateCache.tensors`); `session_store.py` copies it by position, so
that pages and slots do not show in a file. What only the tiers below the cache have `session_fetch.py` brings in
pieces, between steps. A static cache takes the sequence as its own; in pages it is adopted (`PageTables.adopt`): free
pages are filled between two steps, then published in the prefix tree, and given up like any idle ones.
`session_file.py` is the format, with its checksum. An answer goes on from its tokens: the sampler counts them, the
assembler replays them in silence.
"""
