"""What all kernels stand on: whether Triton runs here, compiling and rehearsing, clocks, bits, elementwise work."""
