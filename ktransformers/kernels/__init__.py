"""How one computation runs: the native CPU kernels and a slow torch oracle of each.

This package knows tensors, block formats and threads. It does not know models, rules, caches' owners or files.
"""
