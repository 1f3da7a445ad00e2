"""The cache of keys, values and recurrent states: as ids first, then as tensors.

- Ids, without torch: `pages.py` and `prefix_tree.py` (pages, who holds them, what they begin with), `page_keys.py` (a
  page's name: the hash of its tokens and of the page before it), `state_slots.py` (slots of recurrent states),
  `tiers.py` (slots of host memory and files), `hot_experts.py` (which experts have a slot on a GPU).
- Tensors: `paged.py` (pages), `static.py` (one page, for a model that is checked), `state.py` (states of recurrent
  layers).
- Files: `page_files.py`, and their folder and its quota in `page_folder.py`.

A `LayerShape` says what one layer keeps, in what type, whose tensors it shares, and in what chunks of positions it
attends: keys and values, a state, both (Falcon-H1, Zamba) or neither. A model without attention (Mamba) has pages of no
bytes, so that the prefix tree and preemption treat it like any other.

A state is never copied: a step names the slot that it is read from, the one that it is written to, and the rows behind
which it is written elsewhere too (`StateStep` in kernels/types.py). So a snapshot costs one write.

Does not know models, requests or devices' kernels. The id side never imports torch.
"""
