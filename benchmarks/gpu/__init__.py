"""The Triton kernels of a GPU, one module for each kind: `python -m benchmarks.gpu.NAME`."""
