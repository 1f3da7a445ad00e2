"""Small tokenizers made from scratch, and the GGUF metadata that describes them."""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "What is 17 + 25? 17 + 25 = 42. The quick brown fox doesn't jump over the lazy dog's tail.",
    "def main():\n    return {'key': [1, 2, 3]}\n\n\n# comment\tand tabs  and   spaces",
    "你好，世界！ktransformers 是一个推理框架。专家在 CPU 上计算，注意力在 GPU 上。",
    "Ünïcödé naïve café résumé ÄÖÜ ß 😀😃🎉 👩‍👩‍👧 한국어 日本語のテキスト العربية 1234567890",
] * 4
STRINGS = [
    "",
    " ",
    "\n\n \t",
    "Hello, world",
    " leading and trailing ",
    "What is 17 + 25?",
    "12345678901234567890",
    "你好，世界！今天天气怎么样？",
    "mixed 中文 and English，123 个",
    "emoji 😀 and 👩‍👩‍👧 and 🏳️‍🌈",
    "I'LL we'd It's DON'T",
    "a  b   c\r\n\r\nd",
    "<|im_start|>user\nhi<|im_end|>\n",
    "x<think>y</think>z",
    "e\u0301 combining, \u212b angstrom",
    "日本語 한국어 العربية עברית",
    "\x00\x01\x7f\u200b\ufeff",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_byte_level(split: pre_tokenizers.PreTokenizer, nfc: bool, ignore_merges: bool = False) -> Tokenizer:
    """A byte-level BPE tokenizer with `split` before the byte-level spelling."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in PLAIN])
    return tokenizer


def gguf_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, Any]:
    """What a converter writes for a byte-level BPE tokenizer."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    kinds = [3 if token in CONTROL else 4 if token in PLAIN else 1 for token in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.eos_token_id": vocab["<|im_end|>"],
        "tokenizer.ggml.bos_token_id": vocab["<|endoftext|>"],
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
