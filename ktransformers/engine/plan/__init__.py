"""Decides what goes where, and whether it fits: placement, caches, tiers, and what would make it fit. Reads no weights.

`planning.py` makes the whole plan from the files' headers; `kv_types.py` and `attention.py` choose types and kernels of
attention, `cache_shapes.py` finds what each layer caches and `cache_plan.py` how much of it, `tier_plan.py` sizes
host memory and files; `expert_disk.py` opens what experts are read from while a model runs. `dry_run.py` says what
would fit before anything is loaded, `fit_suggestions.py` which flags would help.
"""
