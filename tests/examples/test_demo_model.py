"""The demo model's own parts: generators, split, template, export, a smoke training, and a short held-out score."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from ktransformers.config import DEMO_MODEL_PATH
from ktransformers.weights.gguf.file import open_gguf
from tests.support.models.demo import DEMO_CHECKPOINT, DEMO_GGUF
from tests.support.models.mtp_models import stored_mtp

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
    assert {f.name for f in DEMO_MODEL_PATH.iterdir()} == {"README.md", DEMO_GGUF.name, DEMO_GGUF.stem}  # one copy
    assert (
        sum(f.stat().st_size for folder in (DEMO_MODEL_PATH, DEMO_CHECKPOINT) for f in folder.iterdir()) <= 42_000_000
    )
    state = load_file(DEMO_CHECKPOINT / "model.safetensors")
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    gguf_file = open_gguf(DEMO_GGUF)
    assert gguf_file.architecture == "qwen3moe"
    elements = sum(torch.Size(t.shape).numel() for t in gguf_file.tensors.values())
    assert elements == sum(t.numel() for t in state.values())


def test_the_layer_that_drafts_computes_what_transformers_does() -> None:
    """Three tokens deep, of what it gave before, at two places of a text."""
    from model import DemoModel, Shape
    from mtp import MtpLayer, hidden_states

    stored = load_file(DEMO_CHECKPOINT / "mtp.safetensors")
    oracle = stored_mtp(AutoModelForCausalLM.from_pretrained(DEMO_CHECKPOINT, dtype=torch.float32).eval(), stored)
    model = DemoModel(Shape())
    model.load_hf_state(load_file(DEMO_CHECKPOINT / "model.safetensors"))
    layer = MtpLayer(Shape(), model)
    layer.load_hf_state(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in layer.hf_state().items())
    token_ids = list(range(50, 90))
    for anchor in (10, 30):
        known = token_ids[: anchor + 2]
        wanted = oracle.drafts(known, 3)
        text = torch.tensor([[*known, *(int(logits.argmax()) for logits in wanted)]])
        with torch.no_grad():
            hidden = hidden_states(model, text)
            outs = layer(model.embed[text[:, 1:-1]], hidden[:, :-2], torch.tensor([[anchor]]))
            for out, logits in zip(outs, wanted, strict=True):
                assert torch.allclose(out[0, 0] @ model.embed.T, logits, atol=1e-3)


@pytest.mark.exhaustive
def test_smoke_training_of_the_layer_that_drafts(tmp_path: Path) -> None:
    """By the seed alone; the model's file stays as it is, and the layer drafts."""
    states = []
    for name in ("one", "other"):
        folder = Path(shutil.copytree(DEMO_CHECKPOINT, tmp_path / name))
        sizes = ("--steps", "3", "--given", "12", "--own", "4", "--free", "2", "--rows", "512")
        command = [sys.executable, str(EXAMPLE / "train_mtp.py"), "--checkpoint", str(folder), *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert (folder / "model.safetensors").read_bytes() == (DEMO_CHECKPOINT / "model.safetensors").read_bytes()
        states.append(load_file(folder / "mtp.safetensors"))
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    import evaluate

    shares = evaluate.main(["--drafts", "--model", str(tmp_path / "one"), "--count", "1", "--skills", "spelling"])
    assert shares.keys() == {f"{name} {depth}" for name in ("greedy", "0.8") for depth in (1, 2, 3)}


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
