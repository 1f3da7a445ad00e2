"""The text layer: token ids to text and back, chat templates, and what streams of text need on their way to a user.

`loading.py` builds a tokenizer from a folder, a GGUF (`gguf_vocab.py`) or a tiktoken file, `tokenizer.py` is what
everybody uses; `detokenizer.py` emits whole characters, `stop.py` holds back what may become a stop string,
`unicode.py` makes halves of characters U+FFFD. `templates` renders conversations and folds what a template does not
keep; `recognition` finds out how calls and reasoning are marked; `answer_parser.py` tells reasoning, text and calls
apart with the parsers of `tools`; `grammars.py` makes masks of what may come next, `schemas` reduces any JSON Schema to
what grammars can follow; `shortening.py` chooses the turns that leave a conversation that is too long.

Knows tokenizers of Hugging Face folders and of GGUF metadata. Does not know models, engines or HTTP.
"""

from ktransformers.tokenizer.loading import has_tokenizer_files, load_tokenizer, read_chat_template
from ktransformers.tokenizer.tokenizer import Message, Tokenizer

__all__ = ["Message", "Tokenizer", "has_tokenizer_files", "load_tokenizer", "read_chat_template"]
