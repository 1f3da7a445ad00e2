"""Writing models as GGUF: from safetensors or another GGUF, quantized, and the activation statistics that help."""
