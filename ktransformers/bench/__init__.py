"""Measurements of the machine that a user has, beside limits and other servers.

`common` is what all of them share: tables and records, the machine, clocks, random weights. `probe` measures what
predictions need, `offline` runs a model without a server, `loading` says how fast one loads. `servers` starts servers
or finds them running, and measures them; `agents` is a load of agents on them, beside llama.cpp's server if wanted.
`gpu` measures what passes between a GPU and the CPU. What only developers measure is in `benchmarks/`.

Does not know the command line: `cli/bench` parses flags and prints.
"""
