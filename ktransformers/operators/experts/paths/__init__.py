"""Ways to compute the routed experts of a step, one file each; `base.py` says what a path is.

`KTransformersExperts` asks the paths of its layer in the order of `routed.PATHS`, and the first that takes a step runs
it:

    path           a layer has it when its experts are     it takes
    resident       on a GPU                                every step
    streamed       on the CPU, those of a layer on a GPU   steps from a threshold on, whose experts it copies there
    hot            the same, some of them in slots there   steps that the stream's order takes
    stream order   on the CPU, those of a layer on a GPU   steps on that GPU of up to STREAM_ROWS rows
    native         on the CPU                              every step; the host waits
    torch          of an activation without a kernel       every step; the host waits

A new path is a file here and a line in `routed.PATHS`.
"""
