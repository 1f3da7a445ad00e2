"""The base of all kernels: whether Triton runs here, compiling and warm-up, clocks, bits, elementwise work."""
