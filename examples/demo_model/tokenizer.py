"""Train the demo model's tokenizer: byte-level BPE with Qwen2's pre-tokenizer (each digit is its own token).

Qwen2's splitting rule is used unchanged, so `tokenizer.ggml.pre = "qwen2"` in the GGUF describes it exactly.
Usage: python examples/demo_model/tokenizer.py --out FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path

from generators import SKILLS, conversation, sample
from render import pieces
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

# The splitting rule of Qwen2's tokenizer (a format, not code): contractions, words, single digits, marks, spaces.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB_SIZE = 2560
CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Kept when special tokens are skipped: the reasoning and tool-call parsers read them in the text.
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def corpus(seed: int, conversations: int) -> Iterator[str]:
    """Training text for the merges: mixed conversations, then every skill in equal parts."""
    rng = random.Random(f"tokenizer/{seed}")
    skip = (*CONTROL, *MARKERS)
    for _ in range(conversations):
        messages, tools = conversation(rng)
        text = "".join(piece for piece, _ in pieces(messages, tools))
        # A long table would drown the rest: its head is enough to learn from.
        text = text[:1500]
        for token in skip:
            text = text.replace(token, "")
        yield text
    for skill in SKILLS:
        for _ in range(conversations // len(SKILLS)):
            yield "\n".join((m.get("content") or "")[:500] for m in sample(skill, rng, heldout=False).messages)


def train(seed: int = 1, conversations: int = 20000) -> Tokenizer:
    """The tokenizer; special tokens take the last ids."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, fuse_unk=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(CONTROL) - len(MARKERS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed, conversations), trainer)
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t in MARKERS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=20000)
    options = parser.parse_args()
    save(train(options.seed, options.conversations), options.out)


if __name__ == "__main__":
    main()
