"""Ollama's API: chat, generate, embeddings and facts about the model. https://docs.ollama.com/api

Streams are lines of JSON and the default; durations are nanoseconds; an error is {"error": "..."}. One model is served,
and it stays loaded: what asks for another one, or to change what there is, is refused by name.
"""
