"""Writes models as GGUF: from safetensors or another GGUF, quantized, and collects statistics that help to quantize.

`quantize_model.py` leads. `tensors.py` and `hf_tensors.py` list what there is to write, `vocab.py` what a file says of
tokens, `mixtures.py` which type each tensor gets, `openable.py` whether llama.cpp could open the result. `header.py`,
`partial_file.py` and `writing.py` make the file, which is resumed when it was stopped. `collect.py` watches a model
over a text and `imatrix.py` keeps what it saw. `pack_model.py` writes a model's experts as the CPU's kernels take them.

Does not know devices or how a model runs, but for `collect.py` and `pack_model.py`.
"""
