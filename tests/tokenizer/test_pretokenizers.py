"""Every pre-tokenizer that GGUF files name, against the `regex` library and patterns as they are published."""

from __future__ import annotations

import itertools

import pytest
import regex

from ktransformers.errors import UnsupportedError
from ktransformers.tokenizer.pretokenizers import PRE_TOKENIZERS, find_pre_tokenizer
from tests.support.gguf.vocabularies import STRINGS

# As the models' tokenizer.json files have them, or llama.cpp where those use other means than one pattern.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
JAIS2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
    r"|\s{1,2}(?!\S)|\s{1}"
)
UFAKZEKA = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MINICPM5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
YOUTU_SCRIPTS = r"[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
DEEPSEEK_V3_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK_V3 = (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK_V3_WORDS)
SPARK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
)
AFMOE_SCRIPTS = (
    "[一-\u9fff㐀-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-ヿ\uff65-ﾟ⼀-\u2fdfเ-\u0e7f\u0e80-\u0effក-\u17ffက-\u109f"
    "ꩠ-ꩿ\ua9e0-\ua9ff가-\ud7afᄀ-ᇿ]+"
)
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"
EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAMELEON = (
    "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", "([\\t\\n]|    |  )", r"\p{N}",
    r"[\p{P}!-/:-@\[-`{-~]", GPT2,
)  # fmt: skip

ORACLES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        [
            "gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum",
            "modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "mpt", "olmo", "jais", "trillion",
            "granite-docling", "exaone4",
        ],
        (GPT2,),
    ),
    **dict.fromkeys(
        ["starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"],
        (r"\p{N}", GPT2),
    ),
    **dict.fromkeys(
        ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
         "dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "glm5"],
        (LLAMA3,),
    ),
    **dict.fromkeys(
        ["qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"],
        (QWEN2,),
    ),
    "qwen35": (QWEN35,), "jais-2": (JAIS2,), "ufakzeka": (UFAKZEKA,), "minicpm5": (r"\p{N}{1,3}", MINICPM5),
    "laguna": (r"[^\n]+|[\n]+", QWEN2),
    **dict.fromkeys(["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "granite-embed-multi-97m"], (O200K,)),
    **dict.fromkeys(["tiny_aya", "cohere2moe"], (r"\d{1,3}(?=(?:\d{3})*\b)", O200K)),
    "youtu": (YOUTU_SCRIPTS, O200K.replace(r"\p{N}{1,3}", r"\p{N}")),
    "tekken": (TEKKEN,),
    **dict.fromkeys(["kimi-k2", "kimi-k25"], (KIMI,)),
    "deepseek-llm": (
        r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-퟿]+",
        r"\p{N}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    **dict.fromkeys(["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"], DEEPSEEK_V3),
    "spark2_5": (r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", SPARK_WORDS, r"\p{N}"),
    "afmoe": (r"\p{N}{1,3}?(?=(?:\p{N}{3})*(?!\p{N}))", AFMOE_SCRIPTS, DEEPSEEK_V3_WORDS),
    "superbpe": (r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    **dict.fromkeys(["bailingmoe", "bailingmoe2", "llada-moe"], (BAILING,)),
    "seed-coder": (SEED,), "exaone-moe": (EXAONE_MOE,),
    **dict.fromkeys(["bloom", "poro-chat", "gpt3-finnish"], (BLOOM,)),
    "viking": (BLOOM, r"\p{N}"),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "chameleon": CHAMELEON,
    **dict.fromkeys(["gemma4", "granite-embed-multi-311m", "sarvam-moe"], ()),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip

HARD = [
    *STRINGS,
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n🚀 (normal) 😶🌫️ (multiple emojis concatenated) ✅ 🦙🦙 3 33 "
    "333 3333 33333 333333 3333333 33333333 3.3 3..3 3...3 កាន់តែពិសេសអាច😁 ?我想在apple工作1314151天～ ------== "
    "нещо на Български ''''''```````\"\"\"\"......!!!!!!?????? I've been 'told he's there, 'RE you sure? 'M not "
    "sure I'll make it, 'D you like some tea? We'Ve a'lL",
    "ied 4 ½ months, Äpfel; w048 7tuijk dsdfhu\r\n\r\n' era\n =", "y'all! Cửa Việt CamelCaseHTTPServer xmlHTTPx",
    "1 12 123 1234 12345x 1234567.89 ٣٤٥٦ ១២៣៤ ½¾ ⅷⅸ", "สวัสดีชาวโลก ພາສາລາວ မြန်မာ 한국어와 漢字カタカナｶﾀｶﾅ",
    "\t\tfoo\n\n\n    bar  \n\tbaz   ",
    "<sentinel:12>IMGIMGABZ IMGIMGZ <|im|> a=b+c;`d`^e~f|g$", "é e\u0301 ñ n\u0303o \u0301\u0302 हिन्दी தமிழ்",
    "“quoted” ‘text’ — ok… 、。「」 ！？：；（）", " " * 700 + "x", "a" + " " * 7 + "\n" + " " * 5, "ǅ ʰ ªº ﬁ ΑΣΑΣ ß ẞ",
    "你好world你好123你好", "///path/to//file\n/", "it's IT'S It'S 'Sam '\u017fs", "a b c d ef g h1 i",
]  # fmt: skip


def split(text: str, patterns: tuple[str, ...]) -> list[str]:
    """Each pattern isolates its matches in the pieces of the one before."""
    pieces = [text]
    for pattern in patterns:
        compiled, after = regex.compile(pattern, regex.V1), []
        for piece in pieces:
            cuts = sorted({0, len(piece), *(end for match in compiled.finditer(piece) for end in match.span())})
            after += [piece[start:end] for start, end in itertools.pairwise(cuts)]
        pieces = after
    return [piece for piece in pieces if piece]


def test_every_name_has_an_oracle() -> None:
    assert sorted(ORACLES) == sorted(PRE_TOKENIZERS)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_words_are_those_of_the_published_patterns(name: str) -> None:
    rule = find_pre_tokenizer(name)
    for text in HARD:
        pieces = rule.build().pre_tokenize_str(text)
        assert [text[start:end] for _, (start, end) in pieces] == split(text, ORACLES[name]), text


def test_unknown_names_are_refused_with_their_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'whitespace' is not one of .*afmoe.*--model_path"):
        find_pre_tokenizer("whitespace")
