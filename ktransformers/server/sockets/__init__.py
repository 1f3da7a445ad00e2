"""What the kernel knows of connections."""
