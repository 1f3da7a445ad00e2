"""A model through the engine, without a server."""
