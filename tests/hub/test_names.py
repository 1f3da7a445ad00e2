"""What people type or paste for a model, and which files of a repository they mean by it."""

from __future__ import annotations

import pytest

from ktransformers.errors import ConfigError
from ktransformers.hub.choice import candidates, choose
from ktransformers.hub.names import ModelName, is_name, parse_name
from ktransformers.hub.variants import Variant, find_variants, is_companion, select


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", ModelName("org/name")),
        ("org/name:Q4_K_M", ModelName("org/name", quant="Q4_K_M")),
        ("org/name@v1.0:Q4_K_M", ModelName("org/name", "v1.0", "Q4_K_M")),
        ("org/name@main", ModelName("org/name")),
        ("org/name@refs/pr/3", ModelName("org/name", "refs/pr/3")),
        ("org/name/sub/file-Q8_0.gguf", ModelName("org/name", file="sub/file-Q8_0.gguf")),
        ("https://huggingface.co/org/name", ModelName("org/name")),
        ("https://huggingface.co/org/name/", ModelName("org/name")),
        ("huggingface.co/org/name", ModelName("org/name")),
        ("https://hf.co/org/name:Q4_K_M", ModelName("org/name", quant="Q4_K_M")),
        ("hf.co/org/name:Q4_K_M", ModelName("org/name", quant="Q4_K_M")),
        ("hf://org/name", ModelName("org/name")),
        ("https://huggingface.co/org/name/tree/main", ModelName("org/name")),
        ("https://huggingface.co/org/name/tree/main/UD-Q2_K_XL", ModelName("org/name", quant="UD-Q2_K_XL")),
        ("https://huggingface.co/org/name/tree/refs%2Fpr%2F1", ModelName("org/name", "refs/pr/1")),
        ("https://huggingface.co/org/name/blob/main/a-Q8_0.gguf", ModelName("org/name", file="a-Q8_0.gguf")),
        (
            "https://huggingface.co/org/name/resolve/v2/x/a.gguf?download=true",
            ModelName("org/name", "v2", file="x/a.gguf"),
        ),
        ("https://huggingface.co/org/name?show_file_info=a.gguf", ModelName("org/name")),
        ("https://mirror.example:8443/org/name", ModelName("org/name")),
    ],
)
def test_names(text: str, name: ModelName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example:8443")
    assert parse_name(text) == name
    assert is_name(text)
    assert parse_name(str(name)) == name


@pytest.mark.parametrize(
    "text",
    ["gpt2", "", "./model.gguf", "/abs/model", "models/model.gguf", "model.gguf", "a/b/c", "../a/b", "a--b/c", "org/",
     "~/models/x", "a b/c", "org/name:", "org/name:Q4:Q5"],
)  # fmt: skip
def test_what_is_no_name(text: str) -> None:
    assert not is_name(text)
    with pytest.raises(ConfigError, match="is not the name of a model"):
        parse_name(text)


def test_links_to_elsewhere() -> None:
    with pytest.raises(ConfigError, match="not on the hub"):
        parse_name("https://example.com/org/name")
    with pytest.raises(ConfigError, match="not a link to a model"):
        parse_name("https://huggingface.co/datasets/org/name")


FILES = [
    "README.md",
    "mmproj-model-F16.gguf",
    "model.imatrix.gguf",
    "model-Q8_0.gguf",
    "model.q4_k_m.gguf",
    "model-IQ2_XXS.gguf",
    "BF16/model-BF16-00001-of-00002.gguf",
    "BF16/model-BF16-00002-of-00002.gguf",
    "UD-Q2_K_XL/model-UD-Q2_K_XL-00001-of-00003.gguf",
    "UD-Q2_K_XL/model-UD-Q2_K_XL-00003-of-00003.gguf",
]


def test_files_by_quantization() -> None:
    variants = {variant.label: variant for variant in find_variants(FILES)}
    assert set(variants) == {"Q8_0", "Q4_K_M", "IQ2_XXS", "BF16", "UD-Q2_K_XL"}
    assert variants["BF16"].weights == tuple(FILES[6:8])
    assert not variants["BF16"].missing
    assert variants["UD-Q2_K_XL"].missing == ("UD-Q2_K_XL/model-UD-Q2_K_XL-00002-of-00003.gguf",)


def test_what_drafts_goes_with_each() -> None:
    """Of several the one closest in bits; files of kinds that are not read go with none."""
    drafters = ["mtp-model-Q8_0.gguf", "mtp-model-Q4_0.gguf", "dspark-model-Q8_0.gguf", "UD-Q2_K_XL/eagle3-model.gguf"]
    variants = {variant.label: variant for variant in find_variants([*FILES, *drafters])}
    assert set(variants) == {"Q8_0", "Q4_K_M", "IQ2_XXS", "BF16", "UD-Q2_K_XL"}
    taken = {label: variant.side for label, variant in variants.items()}
    eight, four = (("mmproj-model-F16.gguf", name) for name in drafters[:2])
    assert taken == {"Q8_0": eight, "BF16": eight, "Q4_K_M": four, "IQ2_XXS": four, "UD-Q2_K_XL": four}
    assert all(is_companion(name) for name in drafters)
    assert not is_companion("MODEL-MTP-Q8_0.gguf")


def test_two_models_in_one_repository_are_told_apart() -> None:
    labels = [
        variant.label for variant in find_variants(["a-Q8_0.gguf", "b/b-Q8_0.gguf", "b/b-Q4_0.gguf", "plain.gguf"])
    ]
    assert labels == ["a-Q8_0", "Q4_0", "b/b-Q8_0", "plain"]


def test_safetensors_bring_what_they_need_and_no_code() -> None:
    files = [
        *("config.json", "generation_config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"),
        *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.jinja"),
        *(
            "tiktoken.model",
            "special_tokens_map.json",
            "modeling_x.py",
            "pytorch_model.bin",
            "README.md",
            "onnx/model.safetensors",
        ),
        *("training_args.bin", "figure.png"),
    ]
    (variant,) = find_variants(files)
    assert sorted(variant.files) == sorted(set(files[:11]))
    (with_code,) = find_variants(files, with_code=True)
    assert set(with_code.files) - set(variant.files) == {"modeling_x.py"}
    assert find_variants([name for name in files if name != "config.json"]) == []


@pytest.mark.parametrize(
    ("name", "label"),
    [("o/n:q8_0", "Q8_0"), ("o/n:Q2_K_XL", "UD-Q2_K_XL"), ("o/n:model-IQ2_XXS", "IQ2_XXS"),
     ("o/n/BF16/model-BF16-00002-of-00002.gguf", "BF16"), ("o/n", None)],
)  # fmt: skip
def test_selecting(name: str, label: str | None) -> None:
    found = select(find_variants(FILES), parse_name(name))
    assert (found and found.label) == label


def test_an_unknown_quantization_lists_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"o/n has no Q4_K_S; did you mean Q4_K_M\? It has: .*BF16.*IQ2_XXS"):
        select(find_variants(FILES), parse_name("o/n:Q4_K_S"))
    with pytest.raises(ConfigError, match=r"no file model-Q8_1.gguf; did you mean model-Q8_0.gguf"):
        select(find_variants(FILES), parse_name("o/n/model-Q8_1.gguf"))


def test_the_best_that_fits() -> None:
    nbytes = {"BF16": 160, "Q8_0": 80, "Q6_K": 60, "Q4_K_M": 45, "Q2_K": 30}
    variants = [Variant(label, (f"{label}.gguf",)) for label in sorted(nbytes)]
    offered = candidates(variants, nbytes)
    assert [variant.label for variant in offered] == ["Q8_0", "Q6_K", "Q4_K_M", "Q2_K"]
    asked = []

    def misfit(variant: Variant) -> str | None:
        asked.append(variant.label)
        return "too large" if variant.label == "Q6_K" else None

    choice = choose(offered, nbytes, 70, misfit)
    assert choice.variant is not None
    assert choice.variant.label == "Q4_K_M"
    assert asked == ["Q6_K", "Q4_K_M"]  # Q8_0 is larger than all memory: no header is read for it
    assert [(variant.label, reason) for variant, reason in choice.refused] == [
        ("Q8_0", "80 B of weights, 70 B free"),
        ("Q6_K", "too large"),
    ]
    assert choose(offered, nbytes, 20, misfit).variant is None
    only_full = [variant for variant in variants if variant.label == "BF16"]
    assert candidates(only_full, nbytes) == only_full
