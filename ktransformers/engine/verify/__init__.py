"""Checks whether a loaded model computes what transformers would: reference modules, hooks, comparisons.

`self_check.py` computes layers of each kind (`layer_kinds.py`) on random tokens, longer than their windows, by our
operators and by transformers' own modules (`reference_module.py`, which reads weights when they are used), and refuses
a model whose modules differ by more than rounding does. `hooks.py` are the hooks. `stack_check.py` compares layers that
are joined on a GPU with what they computed one by one.
"""
