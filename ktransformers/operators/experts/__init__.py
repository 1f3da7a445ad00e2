"""Routed experts: the block, the router, and where experts are computed."""
