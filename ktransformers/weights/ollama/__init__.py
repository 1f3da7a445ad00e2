"""Differences of Ollama's own converter from llama.cpp's."""
