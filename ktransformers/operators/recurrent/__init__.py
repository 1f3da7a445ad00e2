"""Layers that keep a state of one size instead of keys and values."""
