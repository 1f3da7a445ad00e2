"""The graph runner, where upstream has it."""

from ktransformers.engine.step.cuda_graph_runner import CUDAGraphRunner as CUDAGraphRunner
