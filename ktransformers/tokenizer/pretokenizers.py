"""The rules by which text is cut into words before BPE merges apply, by the name in GGUF's `tokenizer.ggml.pre`.

A GGUF file holds the name of a pre-tokenizer and not its rule, so readers need a table. The patterns are those that the
named models publish in their own `tokenizer.json` (Oniguruma syntax, which `tokenizers` runs); which names share one
pattern, and which vocabularies look whole words up before merging (`ignore_merges`), is part of the GGUF format as
llama.cpp reads it. Does not know vocabularies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tokenizers import Regex, normalizers, pre_tokenizers

from ktransformers.errors import UnsupportedError

__all__ = ["PRE_TOKENIZERS", "QUADRATIC_PATTERNS", "SPACE_PATTERNS", "PreTokenizer", "find_pre_tokenizer"]


SPACE_PATTERNS = (" +", r"\A | \z")
"""Runs of spaces, and the one at either end: SentencePiece may shorten the first and drop the second."""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule of a pre-tokenizer: patterns in turn, each isolating its matches, and facts on the vocabulary."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token of its own is taken whole
    nfc: bool = False  # text is brought to Unicode NFC first
    adds_bos: bool = False  # where the file does not say
    byte_level: bool = True  # tokens spell bytes as GPT-2 does; else text, its spaces as U+2581

    def normalizer(self) -> normalizers.Normalizer | None:
        """The rule's part that comes before splitting, or None."""
        return normalizers.NFC() if self.nfc else None

    def build(self) -> pre_tokenizers.PreTokenizer:
        """Build the rule as a `tokenizers` object, byte-level spelling included."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"

_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _tiktoken(digits: str, punctuation_tail: str = r"[\r\n]*") -> str:
    """The pattern of cl100k and its descendants; they differ in how many digits make a word."""
    return rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+{punctuation_tail}|{_SPACES}"


def _cased(digits: str, contraction: str) -> str:
    """The pattern of o200k and of Mistral's tekken: words end where the case goes from lower to upper."""
    return (
        rf"{_LEAD}{_UPPER}*{_LOWER}+{contraction}|{_LEAD}{_UPPER}+{_LOWER}*{contraction}"
        rf"|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
    )


def _deepseek_v3_words(punctuation_tail: str = r"[\r\n]*", newlines: str = r"\s*[\r\n]+") -> str:
    """The last pattern of DeepSeek-V3 and its descendants: a word may begin with punctuation, marks are of words."""
    return (
        rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+{punctuation_tail}|{newlines}|\s+(?!\S)|\s+"
    )


def _kimi() -> str:
    """That of o200k with words of Han on their own: `&&` is "and" in sets of characters."""
    upper, lower = (f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER))
    return (
        rf"[\p{{Han}}]+|{_LEAD}{upper}*{lower}+{_CONTRACTIONS}?|{_LEAD}{upper}+{lower}*{_CONTRACTIONS}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


_ASCII_PUNCTUATION = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""
_KANA_AND_HAN = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_HAN_AND_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
# The cased letters that DeepSeek-LLM's tokenizer.json lists; not a Unicode property, so spelled out as there.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)

_GPT2 = PreTokenizer((_GPT2_PATTERN,))
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2_PATTERN))
_CL100K = PreTokenizer((_tiktoken(r"\p{N}{1,3}"),))
_LLAMA3 = replace(_CL100K, ignore_merges=True, adds_bos=True)
_QWEN = PreTokenizer((_tiktoken(r"\p{N}"),))
_QWEN2 = replace(_QWEN, nfc=True)
_O200K = PreTokenizer((_cased(r"\p{N}{1,3}", _CONTRACTIONS + "?"),))
_DEEPSEEK_V3 = PreTokenizer((r"\p{N}{1,3}", _KANA_AND_HAN, _deepseek_v3_words()))
_BAILING = PreTokenizer(
    (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+",
    )
)

_JAIS2_SPACES = "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4, "1,2"))
_BLOOM = PreTokenizer((" ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+",))
_FALCON_PUNCTUATION = r"\p{P}\$\+<=>\^~\|"
# Scripts that write no spaces between words, as AFMoE's tokenizer lists them.
_UNSPACED_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f"
    "\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f"
    "\ufe30-\ufe4f]+|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_TEXT = PreTokenizer((), byte_level=False)  # merges apply to the whole text
# Digits in threes from the right. Each looks at all digits that follow.
_AFMOE_DIGITS, _COHERE2_DIGITS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", r"\d{1,3}(?=(?:\d{3})*\b)"
_SUPERBPE_DIGITS = r"(?=(\d{3})+(?!\d))"

QUADRATIC_PATTERNS = (_AFMOE_DIGITS, _COHERE2_DIGITS, _SUPERBPE_DIGITS)
"""Patterns whose time grows with the square of a text's length: 100,000 digits take 4 s to 30 s."""

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    **dict.fromkeys(
        (
            *("gpt-2", "phi-2", "jais", "trillion", "gigachat", "exaone4", "a.x-4.0", "mellum", "granite-docling"),
            *("roberta-bpe", "modern-bert", "jina-v1-en", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de"),
            "jina-v2-code",
        ),
        _GPT2,
    ),
    **dict.fromkeys(("mpt", "olmo"), replace(_GPT2, nfc=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"), _GPT2_DIGITS
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        _LLAMA3,
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _CL100K),
    **dict.fromkeys(("glm4", "glm5"), replace(_CL100K, ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "f2llmv2"), _QWEN2),
    **dict.fromkeys(("stablelm2", "hunyuan", "solar-open", "grok-2", "kormo"), _QWEN),
    "qwen35": PreTokenizer(
        (rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}",),
        nfc=True,
    ),
    "laguna": PreTokenizer((r"[^\n]+|[\n]+", *_QWEN.patterns)),
    "minicpm5": PreTokenizer((r"\p{N}{1,3}", _tiktoken(r"\p{N}+")), ignore_merges=True),
    "jais-2": PreTokenizer((_tiktoken(r"\p{N}{1,3}").replace(_SPACES, rf"\s*[\r\n]+|{_JAIS2_SPACES}|\s"),)),
    # Qwen's without contractions: suffixes after an apostrophe stay with their Turkish word.
    "ufakzeka": PreTokenizer((_tiktoken(r"\p{N}").removeprefix(f"{_CONTRACTIONS}|"),)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2", "talkie"), _O200K),
    "granite-embed-multi-97m": replace(_O200K, ignore_merges=True),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), PreTokenizer((_COHERE2_DIGITS, *_O200K.patterns))),
    "youtu": PreTokenizer((_YOUTU_SCRIPTS, _cased(r"\p{N}", _CONTRACTIONS + "?")), ignore_merges=True),
    **dict.fromkeys(("kimi-k2", "kimi-k25"), PreTokenizer((_kimi(),), ignore_merges=True)),
    "tekken": PreTokenizer((_cased(r"\p{N}", ""),), ignore_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(
        (
            "[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _HAN_AND_HANGUL,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_AND_HANGUL, r"\p{N}")),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"), _DEEPSEEK_V3),
    "spark2_5": PreTokenizer(
        (r"\p{N}{1,3}", _KANA_AND_HAN, _deepseek_v3_words(punctuation_tail="", newlines=r"[\r\n]"), r"\p{N}")
    ),
    "afmoe": PreTokenizer((_AFMOE_DIGITS, _UNSPACED_SCRIPTS, _deepseek_v3_words())),
    "superbpe": PreTokenizer((r"\p{N}+", _SUPERBPE_DIGITS)),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _BAILING),
    "seed-coder": PreTokenizer((rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    "exaone-moe": PreTokenizer(
        (
            rf"{_CONTRACTIONS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _BLOOM),
    "viking": PreTokenizer((*_BLOOM.patterns, r"\p{N}")),
    "falcon": PreTokenizer((rf"[{_FALCON_PUNCTUATION}`]+", _GPT2_PATTERN, "[0-9][0-9][0-9]")),
    "chameleon": PreTokenizer(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            "([\\t\\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2_PATTERN,
        ),
        adds_bos=True,
    ),
    "gemma4": replace(_TEXT, adds_bos=True),
    "granite-embed-multi-311m": replace(_TEXT, adds_bos=True),
    "sarvam-moe": _TEXT,
    # What llama.cpp does for files that name no pre-tokenizer, or "default".
    "default": PreTokenizer((rf"[{_FALCON_PUNCTUATION}]+", _GPT2_PATTERN, r"\p{N}+", "[0-9][0-9][0-9]")),
}
"""By the value of `tokenizer.ggml.pre`."""


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """Return the rule that GGUF files call `name`. Raises UnsupportedError for one that is not in the table."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise UnsupportedError(
            f"the GGUF file's pre-tokenizer {name!r} is not one of {', '.join(sorted(PRE_TOKENIZERS))}; "
            "pass --model_path with a folder that holds the model's tokenizer.json"
        ) from None
