"""Command lines of `ktransformers bench`, one file per command."""
