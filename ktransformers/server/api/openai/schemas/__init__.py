"""The bodies of requests, as OpenAI's API defines them, with the extensions that vLLM's and llama.cpp's users know.

Types are strict. Which names there are, and what becomes of the others, says `api/openai/fields.py`.
"""

from ktransformers.server.api.openai.schemas.chat import ChatBody
from ktransformers.server.api.openai.schemas.completions import CompletionBody
from ktransformers.server.api.openai.schemas.embeddings import EmbeddingsBody
from ktransformers.server.api.openai.schemas.generation import GenerationFields
from ktransformers.server.api.openai.schemas.messages import ChatMessage, FunctionTool, MessageToolCall
from ktransformers.server.api.openai.schemas.tokens import DetokenizeBody, TokenizeBody

__all__ = [
    "ChatBody",
    "ChatMessage",
    "CompletionBody",
    "DetokenizeBody",
    "EmbeddingsBody",
    "FunctionTool",
    "GenerationFields",
    "MessageToolCall",
    "TokenizeBody",
]
