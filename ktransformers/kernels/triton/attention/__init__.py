"""Attention over paged caches: grouped, latent, compressed, sparse; rotations and codes of keys and values."""
