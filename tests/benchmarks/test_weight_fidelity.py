"""`benchmarks.fidelity --types`: quantized weights beside fp32, on little work."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.fidelity.__main__ import main
from benchmarks.fidelity.weights import summary


def fidelity(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[str, dict[str, Any]]:
    """Text and record of one run."""
    assert main([*args]) == 0
    text, _, last = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    record: dict[str, Any] = json.loads(last)
    return text, record


def test_fidelity_of_weights(capsys: pytest.CaptureFixture[str]) -> None:
    text, record = fidelity(capsys, "--types", "given,f32", "--tokens", "24", "--threads", "1")
    given, exact = record["rows"]
    assert (given["type"], exact["type"]) == ("given", "f32")
    assert 0 <= exact["kl_median"] < 1e-9 < 1e-5 < given["kl_median"] < 0.1  # fp32's rounding, against int8 activations
    assert all(row["kl_median"] <= row["kl_p99"] and row["spread"] >= 1 for row in record["rows"])
    assert (record["num_tokens"], record["num_texts"], record["has_own_texts"]) == (24, 2, False)
    assert "KL, median" in text
    assert "ratio" not in given


def test_fidelity_of_weights_says_which_peer_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    args = ("--types", "given", "--text", "own", "--tokens", "16", "--peer", "llama.cpp", "--threads", "1")
    text, record = fidelity(capsys, *args)
    assert "peer llama.cpp is not installed" in text
    assert record["has_own_texts"]
    assert "peer_kl_median" not in record["rows"][0]


@pytest.mark.skipif(importlib.util.find_spec("llama_cpp") is None, reason="needs llama-cpp-python")
def test_fidelity_of_weights_beside_llama(capsys: pytest.CaptureFixture[str]) -> None:
    args = ("--types", "f32", "--tokens", "24", "--peer", "llama.cpp", "--threads", "1")
    _, record = fidelity(capsys, *args)
    assert 0 < record["rows"][0]["peer_kl_median"] < 1e-6  # the same texts, the same positions


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (("--types", "q9"), "--types q9 is not one of"),
        (("--types", "q8_0", "--kv_types", "int8"), "choose one of them"),
        (("--types", "q8_0", "--attention_products", "kv"), "choose one of them"),
        (("--attention_products", "kv"), "--attention_products kv of int8 is of GPUs: add --use_cuda"),
        (("--types", "q8_0", "--layers", "2"), "leave --synthetic and --layers out"),
        (("--types", "q8_0", "--use_cuda"), "leave --use_cuda out"),
        (("--types", "q8_0", "--texts", "1"), "--texts must be at least 2"),
        (("--peer", "llama.cpp"), "--peer goes with --types"),
        (("--text", "own"), "--text goes with --types"),
        (("--texts", "3"), "--texts goes with --types"),
    ],
)
def test_fidelity_refuses_what_it_would_not_use(
    capsys: pytest.CaptureFixture[str], args: tuple[str, ...], wanted: str
) -> None:
    assert main([*args]) != 0
    assert wanted in capsys.readouterr().err


def test_a_summary_is_of_all_texts_and_spreads_by_halves() -> None:
    odd, even = torch.tensor([1.0, 2.0, 3.0]).double(), torch.tensor([4.0, 6.0, 8.0]).double()
    assert summary([odd, even]) == {
        "kl_median": 3.0,  # torch's: the lower of the two in the middle
        "kl_mean": 4.0,
        "kl_p99": pytest.approx(np.quantile([1, 2, 3, 4, 6, 8], 0.99)),
        "spread": 3.0,
    }
