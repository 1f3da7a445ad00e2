"""Checks whether a loaded model computes what transformers would.

`self_check.py` computes layers of each kind (`layer_kinds.py`) on random tokens, longer than their windows, by our
operators (`checked_model.py`) and by transformers' own modules (`reference_module.py`, which reads weights when they
are used), each layer given the same (`layer_pass.py`), and refuses a model whose modules differ by more than rounding
does. `stack_check.py` compares layers that are joined on a GPU with what they computed one by one. How modules are
watched and results compared is said once for all checks: `operators/recorder.py`, `operators/comparison.py`.
"""
