"""`python -m benchmarks.kernels`: a layer of routed experts on the CPU, beside other programs."""
