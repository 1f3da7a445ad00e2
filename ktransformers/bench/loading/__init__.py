"""How fast a model is loaded."""
