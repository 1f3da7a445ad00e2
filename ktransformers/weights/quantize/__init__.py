"""Writing few bits: the search for scales and grids, and files of other types."""
