"""Whole decoder layers: run in native calls on the CPU, in few launches on a GPU, and the loop over them."""
