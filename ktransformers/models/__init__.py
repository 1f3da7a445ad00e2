"""Models: facts in types out of their configs, what is particular to families, and configs made from GGUF.

`facts.py` reads a Hugging Face config once, checks it, and says it in types (`layers.py`: layers and their kinds,
heads, windows, experts, lengths). `families.py` is the table of which families run and why others do not, `registry.py`
has what is particular to a family, `composite.py` takes the text config out of one for images and text,
`mtp_config.py` makes that of a layer for multi-token prediction.
`deepseek_v41` has config and modules of a family that transformers lacks.
`gguf` makes a config from GGUF metadata, with a module each for values, keys, rotation, recommended sampling and
refusals. `heads.py` says whether files hold an output head; `fused_experts_adapter.py` makes experts modules of a form
of their own (DBRX, JetMoE) into the usual one; `synthetic_shapes.py` has shapes of published models for measuring.

Tables of families are here; which names their tensors have in files, `weights` and `convert` know. Does not know
weights, devices or operators.
"""
