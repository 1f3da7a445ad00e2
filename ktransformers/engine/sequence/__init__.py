"""A sequence: its prompt and parameters, its tokens, its outputs, and its session on disk.

`prompts.py`, `keywords.py` and `outputs.py` are what callers give and get, `partial.py` an answer that is not over;
`output_processor.py` says what a token means (text, stop strings, reasons), in this process and in balance_serve;
`profiled.py` describes model and machine for profiles.

    BatchLoop ── StoredSession ── write_saved ── FILE.safetensors ── read_saved ──> BatchLoop

What a cache keeps has names (`PagedCache.tensors`, `StateCache.tensors`); `session_store.py` copies it by position, so
that pages and slots do not show in a file. What only the tiers below the cache have `session_fetch.py` brings in
pieces, between steps. Loaded pages are adopted (`PageTables.adopt`): free ones are filled between two steps, then
published in the prefix tree, and given up like any idle ones.
`session_file.py` is the format, with its checksum. An answer goes on from its tokens: the sampler counts them, the
assembler replays them in silence.
"""
