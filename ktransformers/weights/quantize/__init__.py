"""Quantizers: the search for scales and grids, and files of other types.

`write.py` has types and bytes, `quant_search.py` searches scales, `grid_search.py` entries of the grids of IQ1 to IQ3,
with `grid_books.py` for entries near a point and `grid_layouts.py` for bytes; `transcode.py` writes a type as another
one that has the same values.
"""
