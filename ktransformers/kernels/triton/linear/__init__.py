"""Products with one matrix: of vectors and of many rows, by layout and form of the weights."""
