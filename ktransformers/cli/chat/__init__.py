"""`ktransformers chat` and local_chat.py: the conversation, its terminal, its commands and settings."""
