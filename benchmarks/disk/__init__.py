"""A model larger than memory, ours and llama.cpp's mapped file under the same limit of a control group."""
