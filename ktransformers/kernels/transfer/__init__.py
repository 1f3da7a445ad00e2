"""What orders work between the CPU and GPUs: the driver, copies, experts in the order of a stream."""
