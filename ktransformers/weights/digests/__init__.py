"""Digests of whole files, kept so that a file is read once and not at each start."""
