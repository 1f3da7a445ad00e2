"""How a row attends: grouped queries and latent attention, on the CPU and on GPUs, and the rotations of both."""
