"""Functions that programs around the server need of it."""
