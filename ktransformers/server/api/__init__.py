"""The HTTP interfaces, one package per API that clients know."""
