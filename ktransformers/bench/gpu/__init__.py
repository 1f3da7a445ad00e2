"""Measurements of a GPU: its kernels, and what passes between it and the CPU."""
