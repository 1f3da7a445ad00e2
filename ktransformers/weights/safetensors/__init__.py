"""Safetensors folders: files, names of checkpoints, and the ways in which few bits are packed.

`file.py` and `source.py` read; `low_bits.py` finds tensors of few bits, `packings.py` knows how libraries pack them,
`codes.py` which type holds the numbers, `quantization.py` what is refused; `fused_experts.py` and `merged.py` put
experts together.
"""
