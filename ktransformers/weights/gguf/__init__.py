"""GGUF files: headers, tensors, and the names that llama.cpp gives them."""
