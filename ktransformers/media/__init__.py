"""Pictures: bytes that a user sends, made into what a model's tower takes, and into ids of a prompt.

    bytes ── bounded, decoded, processed in a child process ──> ReadPicture ── store ──> a file by its digest
                                                                   │
    conversation ── template, each picture's text in its place ──> prompt ids, whose picture positions are pseudo-ids

Rooms: `records.py`, what crosses the borders of processes, without torch; `picture.py`, a picture that is ready. Does
not know HTTP, engines or towers (`engine/media`).
"""
