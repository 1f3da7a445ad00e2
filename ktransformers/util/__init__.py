"""Names under which upstream's scripts import the generation loop and the graph runner: one line each, and nothing
else.

`utils` names `prefill_and_generate`, `cuda_graph_runner` names `CUDAGraphRunner`; both are made and tested in `engine`.
Does not know how either works, and nothing in this package imports from here: new code takes them from `engine`.
"""
