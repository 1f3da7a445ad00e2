"""Weights: GGUF and safetensors files, their names in both worlds, and the source protocol that operators read from.

`source.py` is the protocol, `mapped_file.py` the memory map, `loader.py` opens whatever a path holds. `gguf` and
`safetensors` read the two kinds of files, `ollama` and `conversion` have names that other converters use, `experts.py`
experts as one tensor. `quantize` writes few bits, `digests` has digests of whole files, `read_ahead.py` asks the system
for bytes before they are wanted, `stored_experts` has files from which experts are read while a model runs,
`cut_source.py` gives ranks parts of tensors, `synthetic.py` makes random weights in memory.

Does not know devices, operators or which family a model is of.
"""
