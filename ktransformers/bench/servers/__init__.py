"""Servers that run or are started, and a client that measures them."""
