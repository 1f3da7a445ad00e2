"""Measurements of a model through the engine, without a server."""
