"""Where upstream's scripts import the generation loop and the graph runner from; both live in engine/."""
