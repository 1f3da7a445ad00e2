"""What Ollama's own converter writes otherwise than llama.cpp's."""
