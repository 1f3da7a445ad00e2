"""Measurements: what this machine, its kernels, whole models and servers do, beside limits and other programs.

`report.py` is what all of them print (a table and one line of JSON), `machine.py` and `bandwidth.py` say what the
machine can do, `timing.py` how long a call takes, `probe.py` what predictions need to know. Then one module for each
`bench` command: kernels and operations, whole models (`offline.py`, `model.py`), servers (`serving.py`, `streams.py`,
`soak.py`), loading and fidelity. `agents` is a load of agents, `gpu` measures a GPU, `peers` runs other programs.

Does not know the command line: `cli/bench` parses flags and prints.
"""
