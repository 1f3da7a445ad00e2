"""Values that come from Python: what they may be, and that the error names the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ktransformers.config import EngineConfig, check_threads
from ktransformers.core import SamplingParams
from ktransformers.errors import ConfigError, reason_of


def test_one_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="42").stop == ("42",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "42"]).stop == ("a", "42")  # type: ignore[arg-type]
    assert SamplingParams().stop == ()


def test_numbers_of_numpy_are_numbers() -> None:
    made = SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2]))  # type: ignore[arg-type]
    assert (made.temperature, made.top_k, made.stop_token_ids) == (0.5, 3, (1, 2))


WRONG: list[tuple[str, Any]] = [
    ("stop", 42),
    ("stop", ["a", 1]),
    ("stop", None),
    ("stop", b"42"),
    ("stop", ""),
    ("stop_token_ids", "42"),
    ("stop_token_ids", [1.5]),
    ("allowed_token_ids", []),
    ("allowed_token_ids", 7),
    ("temperature", "hot"),
    ("temperature", None),
    ("temperature", True),
    ("temperature", float("inf")),
    ("top_k", 1.5),
    ("top_k", None),
    ("top_k", 1 << 31),
    ("seed", "7"),
    ("seed", 1 << 64),
    ("max_tokens", 0.5),
    ("max_tokens", 0),
    ("logprobs", True),
    ("logit_bias", [1]),
    ("logit_bias", {"a": 1.0}),
    ("logit_bias", {1: "a"}),
    ("ignore_eos", "yes"),
    ("repetition_penalty", float("nan")),
]


@pytest.mark.parametrize(("field", "value"), WRONG, ids=repr)
def test_a_wrong_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}|^stop strings"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", ["4", 1.5, None, True, -1, 1 << 41])
@pytest.mark.parametrize("field", ["cache_lens", "chunk_size", "max_new_tokens", "cpu_infer"])
def test_counts_of_the_configuration(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"^--{field} must be "):
        EngineConfig(gguf_path=tmp_path, **{field: value}).resolved()


def test_threads() -> None:
    check_threads("threads", 0)
    check_threads("threads", 1)
    with pytest.raises(ConfigError, match=r"^--threads must be at least 0, got -1$"):
        check_threads("threads", -1)
    with pytest.raises(ConfigError, match=r"^--threads 5000 is far beyond this machine's \d+ cores; leave it out$"):
        check_threads("threads", 5000)


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError(2, "No such file or directory", "x"), "No such file or directory"),
        (KeyError("added_tokens"), "the key 'added_tokens' is missing"),
        (ValueError("first line\n  second"), "first line second"),
        (ValueError(""), "ValueError"),
        (ValueError("x" * 900), "x" * 197 + "..."),
        (
            OSError(
                "Can't load tokenizer for '/m'. If you were trying to load it from 'https://huggingface.co/models', "
                "make sure you don't have a local directory with the same name. Otherwise, make sure '/m' is correct"
            ),
            "Can't load tokenizer for '/m'",
        ),
        (
            ValueError("/m does not appear to have a file named config.json. Checkout your page. Make sure that it is"),
            "/m does not appear to have a file named config.json",
        ),
        (ValueError("contains custom code. Please pass the argument `trust_remote_code=True`"), "contains custom code"),
    ],
)
def test_other_libraries_errors_lose_their_advice(error: Exception, says: str) -> None:
    assert reason_of(error) == says
