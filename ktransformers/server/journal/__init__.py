"""The journal of what a server must know again after it was killed: which requests with kept streams ran, and how far
they were.

    event loop ── records ──> Journal ── a thread ──> JournalFile

records.py says what is in it, file.py how it lies there.
"""
