"""/v1/embeddings, asked by OpenAI's client."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

from ktransformers.server.answers.embed import shown_vector

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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"input": ""}, "input is empty"),
        ({"input": []}, "input is empty"),
        ({"input": [""]}, "prompt is empty"),
        ({"input": "a", "dimensions": 1000}, "dimensions 1000 are more than this model's embeddings have: 256"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": [1 << 20]}, "names token 1048576"),
        ({"input": "a " * 20000}, "room for 2048"),
        ({"input": ["a"] * 129}, "may have 128 prompts"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ],
)
def test_wrong_requests(body: dict[str, Any], says: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=says):
        client.embeddings.create(model="demo", **body)


def test_a_vector_is_cut_then_scaled_or_left_as_it_is() -> None:
    vector = np.array([3, 4, 12], dtype=np.float32)
    assert shown_vector(vector, 2, normalizes=True).tolist() == np.array([0.6, 0.8], dtype=np.float32).tolist()
    assert shown_vector(vector, 2, normalizes=False).tolist() == [3, 4]
    assert shown_vector(vector, None, normalizes=False).tolist() == [3, 4, 12]
    assert shown_vector(np.zeros(2, dtype=np.float32), None, normalizes=True).tolist() == [0, 0]
