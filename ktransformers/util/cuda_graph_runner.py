"""The graph runner, under the name that upstream has for it."""

from ktransformers.engine.step.cuda_graph_runner import CUDAGraphRunner as CUDAGraphRunner
