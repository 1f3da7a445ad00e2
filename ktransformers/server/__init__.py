"""HTTP: turns requests into generations and their events into responses. Does not know how a model is run."""
