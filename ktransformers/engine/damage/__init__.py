"""Finds what is wrong with the weights of a model whose logits are no numbers."""
