"""Safetensors folders: files, names of checkpoints, and the ways in which few bits are packed."""
