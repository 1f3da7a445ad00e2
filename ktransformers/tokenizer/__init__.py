"""TEXT: token ids to text and back, chat templates, and what streams of text need on their way to a user.

Knows tokenizers of Hugging Face folders and of GGUF metadata. Does not know models, engines or HTTP.
"""

from ktransformers.tokenizer.loading import has_tokenizer_files, load_tokenizer, read_chat_template
from ktransformers.tokenizer.tokenizer import Message, Tokenizer

__all__ = ["Message", "Tokenizer", "has_tokenizer_files", "load_tokenizer", "read_chat_template"]
