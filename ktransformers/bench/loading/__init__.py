"""Measurements of how fast a model is loaded."""
