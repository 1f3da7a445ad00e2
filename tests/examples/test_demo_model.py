"""The demo model's own parts: generators, split, template, export, a smoke training, and a short held-out score."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.weights.gguf.file import open_gguf
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF

EXAMPLE = DEMO_CHECKPOINT.parent


@pytest.fixture(autouse=True)
def example_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    for name in set(sys.modules) - before:  # `data`, `model` and the like must not leak into other tests
        if str(EXAMPLE) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def generators() -> ModuleType:
    import generators

    return generators


def test_the_same_seed_gives_the_same_text() -> None:
    made = [generators().conversation(random.Random(f"x{i}")) for i in range(50)]
    assert made == [generators().conversation(random.Random(f"x{i}")) for i in range(50)]
    assert len({json.dumps(m) for m, _ in made}) > 45


def test_held_out_tasks_never_occur_in_training() -> None:
    module, rng = generators(), random.Random(5)
    for skill in module.SKILLS:
        trained = {module.sample(skill, rng, heldout=False).key for _ in range(150)}
        held = {module.sample(skill, rng, heldout=True).key for _ in range(20)}
        assert not trained & held, skill
        assert all(module.is_heldout(skill, key) for key in held)


def test_arithmetic_answers_are_right() -> None:
    from generators import arithmetic

    for i in range(300):
        task = arithmetic.generate(random.Random(i))
        question, answer = task.messages[0]["content"], task.answer["content"]
        for sign, apply in (("+", int.__add__), ("-", int.__sub__)):
            left, _, right = question.partition(f" {sign} ")
            a, b = left.split()[-1:] or [""], right.split()[:1] or [""]
            b = [b[0].rstrip("?.,=！？。")]
            if right and a[0].isdigit() and b[0].isdigit() and len(right.split()) == 1:
                assert str(apply(int(a[0]), int(b[0]))) in answer, (question, answer)


def test_template_is_what_training_rendered() -> None:
    from render import pieces

    tokenizer = AutoTokenizer.from_pretrained(DEMO_CHECKPOINT)
    rng = random.Random(11)
    seen_tools = 0
    for _ in range(150):
        messages, tools = generators().conversation(rng)
        seen_tools += bool(tools)
        rendered = tokenizer.apply_chat_template(messages, tools=tools or None, tokenize=False)
        assert rendered == "".join(text for text, _ in pieces(messages, tools))
    assert seen_tools > 5
    opened = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, enable_thinking=True, tokenize=False
    )
    assert opened.endswith("<|im_start|>assistant\n<think>\n")


def test_shipped_files_are_small_and_agree() -> None:
    assert {f.name for f in DEMO_MODEL_PATH.iterdir()} == {"README.md", DEMO_GGUF.name}  # one copy in the wheel
    assert (
        sum(f.stat().st_size for folder in (DEMO_MODEL_PATH, DEMO_CHECKPOINT) for f in folder.iterdir()) <= 40_000_000
    )
    state = load_file(DEMO_CHECKPOINT / "model.safetensors")
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    gguf_file = open_gguf(DEMO_GGUF)
    assert gguf_file.architecture == "qwen3moe"
    elements = sum(torch.Size(t.shape).numel() for t in gguf_file.tensors.values())
    assert elements == sum(t.numel() for t in state.values())


@pytest.mark.exhaustive
def test_smoke_training_learns_and_exports(tmp_path: Path) -> None:
    tokenizer = DEMO_CHECKPOINT / "tokenizer.json"
    command = [sys.executable, str(EXAMPLE / "train.py"), "--smoke", "--steps", "9", "--tokenizer", str(tokenizer)]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split(" loss ")[1].split()[0]) for line in done.stdout.splitlines() if " loss " in line]
    assert losses[-1] < losses[0]
    assert any(tmp_path.glob("*.safetensors"))


@pytest.mark.exhaustive
def test_held_out_score_of_a_sample() -> None:
    """Ten tasks of every skill but the long ones; the full score is in the model card and made by evaluate.py."""
    import evaluate

    quick = [skill for skill in generators().SKILLS if skill != "retrieval"]
    scores = evaluate.main(["--count", "10", "--skills", *quick])
    assert sum(scores.values()) / len(scores) >= 0.95
    assert min(scores.values()) >= 0.8  # two of ten: what a 95 % skill misses once in a hundred runs
