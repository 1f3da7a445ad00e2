"""Triton kernels of the GPU path. Importing the package needs neither Triton nor a GPU: ask `runtime.available()`."""
