"""Facts that the kernel knows of connections."""
