"""`python -m benchmarks.roofline`: a picture of kernels against the limits of a machine."""
