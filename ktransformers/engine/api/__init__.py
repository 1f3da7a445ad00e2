"""Checks what callers of LLM and AsyncLLM give: keywords, prompts, conversations, and the process they call from."""
