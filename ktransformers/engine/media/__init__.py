"""Towers and their place in a step: pictures of the store to hidden states in the rows of a step.

    MediaItem.digest ── PictureEncoder (the model's tower) ──> PictureFeatures ──> rows of the step's embedding

Rooms: `features.py`, what a tower gives; `towers.py`, a tower with its weights and where they are; `encoder.py`, who
runs it; `positions.py`, M-RoPE; `family.py`, what else a model does with positions of pictures; `stored.py`, the
store's files; `rows.py`, which rows of a step show what. Knows pixels as the processor left them (`media/`), no files
of users, no scheduler.
"""
