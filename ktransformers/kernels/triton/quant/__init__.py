"""Quantized weights as a GPU reads them: layouts, unpacking of a tile, tables, block-wise integers."""
