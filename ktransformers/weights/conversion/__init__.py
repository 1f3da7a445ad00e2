"""Makes a model's parameters of a checkpoint's tensors, by the operations in `transformers`' conversion tables."""
