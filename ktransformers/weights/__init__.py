"""Bytes: GGUF and safetensors files, their names in both worlds, and the source protocol that operators read from."""
