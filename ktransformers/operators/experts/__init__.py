"""Routed experts: the block, the router, and where experts are computed.

`router.py` routes, `routed.py` is the operator that issues experts (`submit`) and waits for them (`collect`),
`block.py` puts shared experts in between. `paths` has the ways to compute a step: in a list, of which the first that
takes it runs it. `resident.py` computes experts that lie on a GPU.

Streamed in prefill: a step of many rows touches all experts of a layer, and a copy over PCIe costs the same for any
number of rows. So experts with many rows are copied to the GPU and computed there from the bytes as the CPU's kernels
read them, in groups through a few buffers (`staging.py`), while the CPU computes the others. `streamed.py` draws who
waits for what; `rates.py` measures and remembers; `split.py` chooses, layer by layer, from the rows of each expert:
pure, and never slower than either side alone by its own rates. A result depends on the split in its last bits.

In slots of a GPU: slots and the map expert -> slot are fixed memory, which captured graphs read; `hot.py` draws the
order of steps, maps and copies. `cache/hot_experts.py` decides who has a slot, on numbers alone. A slot is written
behind the last step that may read it, and named by the map once the host has seen its bytes arrive.

In files: experts on the CPU may stay there, and a store reads them as kernels need them (operators/expert_files.py,
kernels/cpu/expert_store.py). Slots of a GPU are filled with them from RAM, as far as they are there; nothing is
streamed, and large steps are the CPU's.
"""
