"""`python -m benchmarks.fidelity`: how far keys and values, or weights, in fewer bits are from fp32."""
