"""The config of a model from the metadata of its GGUF file, and the other way round."""
