"""/v1/embeddings, asked by OpenAI's client."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from ktransformers.server.answers.embed import Cut, _prompt_ids, shown_vector
from ktransformers.weights.gguf.file import open_gguf
from tests.support.models.demo import DEMO_GGUF
from tests.support.servers.server_process import ServerProcess

TEXT = "Count from one to a hundred, then back, please, and then again with more words. "


def test_one_vector_for_each_input(client: openai.OpenAI) -> None:
    made = client.embeddings.create(model="demo", input=[TEXT, "short", TEXT + "more"])
    first, short, longer = (np.array(one.embedding) for one in made.data)
    assert [one.index for one in made.data] == [0, 1, 2]
    assert np.allclose([np.linalg.norm(one) for one in (first, short, longer)], 1, atol=1e-6)
    assert first @ longer > first @ short
    assert (made.model, made.usage.total_tokens) == ("demo", made.usage.prompt_tokens)
    (alone,) = client.embeddings.create(model="demo", input=TEXT, encoding_format="float").data
    assert np.array_equal(np.array(alone.embedding, dtype=np.float32), first.astype(np.float32))
    (cut,) = client.embeddings.create(model="demo", input=TEXT, dimensions=64).data
    assert np.allclose(cut.embedding, first[:64] / np.linalg.norm(first[:64]), atol=1e-6)


def test_token_ids_are_taken_as_they_are(client: openai.OpenAI) -> None:
    ids = client.post("/../tokenize", body={"prompt": TEXT}, cast_to=dict[str, Any])["tokens"]
    by_text, by_ids, by_lists = (client.embeddings.create(model="demo", input=one).data for one in (TEXT, ids, [ids]))
    assert by_text[0].embedding == by_ids[0].embedding == by_lists[0].embedding


def test_long_inputs_are_cut_where_it_is_asked(client: openai.OpenAI) -> None:
    """The last tokens stay, as in vLLM; with truncation_side right the first."""
    ids = client.post("/../tokenize", body={"prompt": TEXT}, cast_to=dict[str, Any])["tokens"]

    def embed(**fields: Any) -> list[float]:
        (made,) = client.embeddings.create(model="demo", input=fields.pop("input", ids), extra_body=fields).data
        return made.embedding

    assert embed(truncate_prompt_tokens=5) == embed(input=ids[-5:])
    assert embed(truncate_prompt_tokens=5, truncation_side="right") == embed(input=ids[:5])
    assert embed(truncate_prompt_tokens=len(ids)) == embed(truncate_prompt_tokens=-1) == embed()
    assert embed(input=TEXT, truncate_prompt_tokens=5) == embed(input=ids[-5:])
    long = ids * 300
    assert embed(input=long, truncate_prompt_tokens=-1) == embed(input=long[-2047:])
    usage = client.embeddings.create(model="demo", input=[ids, ids[:2]], extra_body={"truncate_prompt_tokens": 3}).usage
    assert usage.prompt_tokens == 5


def test_what_the_tokenizer_puts_around_a_text_stays() -> None:
    class Around:
        def encode(self, text: str, *, add_special_tokens: bool = True, max_len: int | None = None) -> list[int]:
            return [1, *map(ord, text), 2] if add_special_tokens else [*map(ord, text)]

    model: Any = SimpleNamespace(tokenizer=Around(), max_len=100)
    assert _prompt_ids(model, "abcdef", Cut(4, keeps_end=True)) == [1, ord("e"), ord("f"), 2]
    assert _prompt_ids(model, "ab", Cut(4, keeps_end=True)) == [1, ord("a"), ord("b"), 2]
    assert _prompt_ids(model, "abcdef", Cut(1, keeps_end=True)) == [2]
    assert _prompt_ids(model, "abcdef", Cut(3)) == [1, ord("a"), ord("b")]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": [""]}, "prompt is empty"),
        ({"input": "a", "dimensions": 1000}, "dimensions 1000 are more than this model's embeddings have: 256"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": [1 << 20]}, "names token 1048576"),
        ({"input": "a " * 20000}, "maximum context length is 2048 tokens"),
        ({"input": ["a"] * 129}, "may have 128 prompts"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "extra_body": {"truncate_prompt_tokens": 0}}, "leaves nothing"),
        ({"input": "a", "extra_body": {"truncate_prompt_tokens": -2}}, "truncate_prompt_tokens"),
    ],
)
def test_wrong_requests(body: dict[str, Any], says: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=says) as refused:
        client.embeddings.create(model="demo", **body)
    extra = body.get("extra_body")
    assert not extra or refused.value.param in extra


def test_a_vector_is_cut_then_scaled_or_left_as_it_is() -> None:
    vector = np.array([3, 4, 12], dtype=np.float32)
    assert shown_vector(vector, 2, normalizes=True).tolist() == np.array([0.6, 0.8], dtype=np.float32).tolist()
    assert shown_vector(vector, 2, normalizes=False).tolist() == [3, 4]
    assert shown_vector(vector, None, normalizes=False).tolist() == [3, 4, 12]
    assert shown_vector(np.zeros(2, dtype=np.float32), None, normalizes=True).tolist() == [0, 0]


@pytest.mark.exhaustive
def test_damaged_weights_are_named_in_both_dialects(tmp_path: Path) -> None:
    path = Path(shutil.copy(DEMO_GGUF, tmp_path / "damaged.gguf"))
    name = "output_norm.weight"
    (file,) = open_gguf(path).files
    with path.open("r+b") as out:
        out.seek(file.tensors[name].offset)
        out.write(struct.pack("<f", float("nan")))
    flags = ("--gguf_path", str(path), "--cache_lens", "256", "--backend_type", "ktransformers", "--self_check", "off")
    with ServerProcess(*flags) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for route in ("/v1/embeddings", "/api/embed"):
            answer = client.post(route, json={"model": "damaged", "input": TEXT})
            assert answer.is_error
            assert "the model computed nan as" in answer.text
            assert f"'{name}' of damaged.gguf (1)" in answer.text
