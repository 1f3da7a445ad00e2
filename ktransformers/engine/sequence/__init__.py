"""One sequence: its prompt and parameters, its tokens, its outputs, and its session on disk."""
