"""Layers that keep a state of one size instead of keys and values.

`kinds.py` finds the operator of a module by what the module is made of; `base.py` is what all share, then a module for
each kind (`delta.py`, `mamba.py`, `short.py` and others). `scans.py` chooses the kernel and has each scan one row at a
time in plain torch. A layer may have two operators that keep something: `ngram_embedding.py` keeps a text's last
tokens, and the rows that its convolution looks back at, in parts of the state that the layer's mixer has too.

Row.read_slot, write_slot and saves of the scheduler become `ForwardContext.states`; no state is copied.
"""
