"""What a GPU does: its kernels, and what passes between it and the CPU."""
