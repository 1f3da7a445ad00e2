"""Quantized weights in the forms that a GPU reads: layouts, unpacking of a tile, tables, block-wise integers."""
