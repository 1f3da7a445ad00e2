"""Where a model comes from: what a user calls it, and the files that this means."""
