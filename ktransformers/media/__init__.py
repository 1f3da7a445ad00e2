"""Pictures: bytes that a user sends, made into what a model's tower takes. Knows neither HTTP nor engines.

    bytes ── bounded, decoded, processed in a child process ──> ProcessedPicture ── store ──> a file by its digest
                                                                      │
    conversation ── template, each picture's text in its place ──> prompt ids, whose picture positions are pseudo-ids

`records.py` is what crosses the borders of processes: plain data, no torch. The tower is the engine's (engine/media).
"""
