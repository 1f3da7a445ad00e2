"""What a model is: facts in types out of its config, what is particular to families, and configs made from GGUF."""
