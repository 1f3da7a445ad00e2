"""GPU kernels in Triton. Importing needs neither a GPU nor Triton; `runtime.available` says what is missing."""
