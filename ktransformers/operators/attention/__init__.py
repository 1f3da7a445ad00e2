"""Attention: grouped queries and latent attention, on the CPU and on GPUs, and the rotations of both.

- Grouped (`gqa.py`, `gqa_gpu.py`): the family's module projects and rotates, then calls our function, registered with
  `AttentionInterface`, which writes keys and values to their slots and attends over the cache.
- Latent (`mla.py`, `latent_*.py`): caches the latent and absorbs the up-projections; on a GPU
  `latent_materialization.py` chooses, once a step, which sequences have their keys expanded instead.
- Compressed (`compressed.py` draws the row of the cache, `compressed_gpu.py` attends): DeepSeek-V4.
- Chosen positions (`indexer.py`, `index_inputs.py`): the choice is a block table for pages of one
  position (`topk_positions.py`), so that the kernels of dense attention do sparse attention too.
- `flash.py` attends by FlashInfer, planned once a step and shape; `rope.py` and `rotation.py` rotate.
"""
