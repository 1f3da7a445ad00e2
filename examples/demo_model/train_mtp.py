"""Train the demo model's layer for multi-token prediction, behind the finished model, which stays as it is.

    python examples/demo_model/train_mtp.py --checkpoint examples/demo_model/checkpoint --minutes 25

Three kinds of text: the conversations that the model was trained on, its own answers to such (half of them greedy, half
at temperature 0.8), and what it writes at 0.8 behind a few words without a template. At each place the layer learns
what the model itself says next there (its whole distribution, not the one token of the text), since that is what its
draft tokens are compared with: one token ahead, and in most steps two and three, of what it gave before.

Muon for the matrices and AdamW for the norms, as in train.py, in BF16 products. Text and initial weights come from
--seed. With --minutes the number of steps depends on the machine, with --steps not.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from data import encode
from generators import conversation
from model import DemoModel, Shape
from mtp import DEEPEST, MtpLayer, hidden_states
from render import pieces
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from train import Muon

from ktransformers import LLM, SamplingParams

MAX_LEN = 384
LONGEST_ANSWER, LONGEST_TEXT = 96, 128
UNSAID = 0.1  # of the places whose token is not the assistant's, the share that is learned
DEPTH_WEIGHTS = (1.0, 0.8, 0.6)
DEEP_SHARE = 0.75  # of the steps: those in which it learns from what it gave before
MUON_LR, ADAM_LR = 0.01, 0.002


@dataclass(frozen=True)
class Text:
    """A text's tokens, and the weight of each as a target."""

    token_ids: list[int]
    weights: list[float]


def given_texts(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[Text]:
    """Conversations that the model was trained on, but for long ones."""
    documents = encode(tokenizer, [pieces(*conversation(rng)) for _ in range(count)])
    return [Text(ids, [s or UNSAID for s in said]) for ids, said in documents if len(ids) <= MAX_LEN]


def _opened(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """A conversation up to where one of the assistant's turns begins."""
    while True:
        said = pieces(*conversation(rng))
        end = rng.choice([at for at, (_, is_said) in enumerate(said) if is_said])
        ids = tokenizer.encode("".join(text for text, _ in said[:end]), add_special_tokens=False).ids
        if len(ids) <= MAX_LEN - LONGEST_ANSWER:
            return ids


def _begun(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """A few words without a template."""
    words = pieces(*conversation(rng))
    text = next(text for text, is_said in words if not is_said).partition("\n")[2].partition("<|")[0]
    return tokenizer.encode(text, add_special_tokens=False).ids[: rng.randint(4, 40)] or [10]


def own_texts(llm: LLM, tokenizer: Tokenizer, rng: random.Random, count: int, free: int) -> list[Text]:
    """What the model answers to `count` prompts, and writes behind `free` beginnings."""
    prompts = [_opened(tokenizer, rng) for _ in range(count)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=rng.getrandbits(31), max_tokens=LONGEST_ANSWER)
        for i in range(count)
    ]
    prompts += [_begun(tokenizer, rng) for _ in range(free)]
    params += [
        SamplingParams(temperature=0.8, seed=rng.getrandbits(31), max_tokens=LONGEST_TEXT, ignore_eos=True)
        for _ in range(free)
    ]
    return [
        Text([*prompt, *answer.token_ids], [0.0] * len(prompt) + [1.0] * len(answer.token_ids))
        for prompt, answer in zip(prompts, llm.generate(prompts, params), strict=True)
    ]


@dataclass
class Batch:
    """Rows of about the same length, padded: `tokens [B, T]`, `hidden [B, T, H]` of the model, BF16, and `weights
    [B, T]` of the tokens as targets, 0 of padding."""

    tokens: Tensor
    weights: Tensor
    hidden: Tensor


def batches_of(model: DemoModel, texts: Sequence[Text], rows: int) -> list[Batch]:
    """All texts in batches of about `rows` tokens, with what the model computes of them."""
    made, pending = list[Batch](), list[Text]()
    for text in [*sorted(texts, key=lambda text: len(text.token_ids)), None]:
        longest = 0 if text is None else len(text.token_ids)
        if pending and (text is None or (len(pending) + 1) * longest > rows):
            length = max(len(one.token_ids) for one in pending)
            tokens = torch.tensor([one.token_ids + [0] * (length - len(one.token_ids)) for one in pending])
            weights = torch.tensor([one.weights + [0.0] * (length - len(one.weights)) for one in pending])
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                made.append(Batch(tokens, weights, hidden_states(model, tokens).bfloat16()))
            pending = []
        if text is not None:
            pending.append(text)
    return made


def anchors_of(targets: Tensor) -> Tensor:
    """Where chains begin, `[B, A]`: at all places whose `targets [B, T]` are said by the assistant, and at a few of
    the others; rows with fewer have some more, whose targets count for what they are."""
    chosen = (targets == 1) | ((targets > 0) & (torch.rand(targets.shape) < UNSAID))
    most = int(chosen.sum(1).max())
    return torch.argsort(chosen.int(), dim=1, descending=True, stable=True)[:, : max(most, 1)]


def loss_of(layer: MtpLayer, model: DemoModel, batch: Batch, depth: int) -> tuple[Tensor, list[float]]:
    """The cross-entropy to the model's distributions, and by depth the share of the assistant's tokens of which the
    layer and the model hold the same one likeliest."""
    embeddings = F.embedding(batch.tokens[:, 1:-1], model.embed)
    weights, rows = batch.weights[:, 2:], torch.arange(len(batch.tokens))[:, None]
    anchors = anchors_of(weights)
    outs = layer(embeddings, batch.hidden[:, :-2].float(), anchors, depth)
    total, right = torch.zeros(()), list[float]()
    for step, out in enumerate(outs):
        places = anchors + step
        is_there = (places < weights.shape[1]) & (weights[rows, anchors] > 0)
        places = places.clamp(max=weights.shape[1] - 1)
        is_there &= weights[rows, places] > 0
        is_said = (weights[rows, places] == 1)[is_there]
        with torch.no_grad():
            wanted = F.linear(batch.hidden[rows, places + 1][is_there], model.embed).float()
        logits = F.linear(out[is_there], model.embed).float()
        total = total + DEPTH_WEIGHTS[step] * F.cross_entropy(logits, wanted.softmax(-1))
        right.append((logits.argmax(-1) == wanted.argmax(-1))[is_said].float().mean().item())
    return total, right


class Trainer:
    """The layer and its optimizers."""

    def __init__(self, model: DemoModel, layer: MtpLayer):
        self.model, self.layer = model, layer
        matrices = layer.matrices()
        chosen = {id(one) for one in matrices}
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(
            [one for one in layer.parameters() if id(one) not in chosen], lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0
        )

    def step(self, batch: Batch, depth: int, scale: float) -> tuple[float, list[float]]:
        """One update at `scale` times the peak rates."""
        with torch.autocast("cpu", torch.bfloat16):
            loss, right = loss_of(self.layer, self.model, batch, depth)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.layer.parameters(), 1.0)
        self.muon.step(MUON_LR * scale)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * scale
        self.adam.step()
        self.layer.zero_grad(set_to_none=True)
        return loss.item(), right


def rate(progress: float) -> float:
    """Learning-rate factor: a short warm-up, level, then linear to zero from 40 % on."""
    return min(1.0, progress / 0.01 + 0.02, max(0.0, (1.0 - progress) / 0.6))


def shuffled(batches: Sequence[Batch], rng: random.Random) -> Iterator[Batch]:
    """All of them again and again, in another order each time."""
    if not batches:
        raise SystemExit("there are no texts to learn from: raise --given, --own or --free")
    while True:
        yield from rng.sample(batches, len(batches))


def train(options: argparse.Namespace, trainer: Trainer, batches: Sequence[Batch]) -> None:
    """The loop: batches, schedule, log."""
    rng, started, window = random.Random(f"mtp/{options.seed}"), time.monotonic(), list[tuple[float, list[float]]]()
    for step, batch in enumerate(shuffled(batches, rng)):
        spent = time.monotonic() - started
        progress = step / options.steps if options.steps else spent / (options.minutes * 60)
        if progress >= 1:
            break
        depth = DEEPEST if rng.random() < DEEP_SHARE else 1
        done = trainer.step(batch, depth, rate(progress))
        if depth == DEEPEST:
            window.append(done)
        if step % options.log_every == 0 and window:
            mean = sum(loss for loss, _ in window) / len(window)
            right = " ".join(f"{sum(one[d] for _, one in window) / len(window):.3f}" for d in range(DEEPEST))
            print(f"step {step} after {spent:.0f} s, progress {progress:.3f} loss {mean:.4f} right {right}", flush=True)
            window = []


def write(layer: MtpLayer, checkpoint: Path) -> None:
    """Put the layer beside the model, whose file stays as it is: a file of its own, an index that names both, and the
    number of such layers in config.json, as Qwen3.5 has it. transformers takes a whole model.safetensors before any
    index, and so never sees the layer."""
    save_file(dict(sorted(layer.hf_state().items())), checkpoint / "mtp.safetensors", metadata={"format": "pt"})
    states = {file: load_file(checkpoint / file) for file in ("model.safetensors", "mtp.safetensors")}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for state in states.values() for tensor in state.values())},
        "weight_map": dict(sorted((name, file) for file, state in states.items() for name in state)),
    }
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}, indent=2) + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="the model's folder; the layer is put there")
    parser.add_argument("--minutes", type=float, default=25.0, help="training time; sets the schedule")
    parser.add_argument("--steps", type=int, default=0, help="number of steps instead of --minutes")
    parser.add_argument("--rows", type=int, default=2048, help="tokens per step")
    parser.add_argument("--given", type=int, default=3000, help="conversations")
    parser.add_argument("--own", type=int, default=1800, help="answers of the model")
    parser.add_argument("--free", type=int, default=300, help="texts that the model writes without a template")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=100)
    return parser.parse_args(arguments)


def make_batches(options: argparse.Namespace, model: DemoModel) -> list[Batch]:
    """What to train on, by the seed."""
    rng = random.Random(f"mtp/{options.seed}/texts")
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    texts = given_texts(tokenizer, rng, options.given)
    began = time.monotonic()
    with LLM(model_path=options.checkpoint, cpu_infer=options.threads, cache_lens=4096, speculative="off") as llm:
        texts += own_texts(llm, tokenizer, rng, options.own, options.free)
    print(f"{len(texts)} texts, its own in {time.monotonic() - began:.0f} s", flush=True)
    texts = [text for text in texts if len(text.token_ids) > 2]
    batches = batches_of(model, texts, options.rows)
    said = sum((batch.weights == 1).sum().item() for batch in batches)
    print(f"{sum(batch.tokens.numel() for batch in batches)} tokens, {said} said", flush=True)
    return batches


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    model = DemoModel(Shape())
    model.load_hf_state(load_file(options.checkpoint / "model.safetensors"))
    model.requires_grad_(False)
    batches = make_batches(options, model)
    torch.manual_seed(options.seed)
    trainer = Trainer(model, MtpLayer(Shape(), model))
    train(options, trainer, batches)
    write(trainer.layer, options.checkpoint)


if __name__ == "__main__":
    main()
