"""Train the demo model from generated text.

    python examples/demo_model/train.py --tokenizer TOKENIZER.json --out build/demo --minutes 15
    python examples/demo_model/train.py --smoke --tokenizer ... --out /tmp/demo      # a tiny model, seconds on a CPU

Muon (Jordan, 2024) for the matrices, AdamW for the rest, fp32 masters, bf16 autocast on a GPU. In the second half
every other step sees the gate/up experts rounded as Q4_K stores them, so that the GGUF answers like the safetensors.
Data and initial weights come from --seed. With --minutes the number of steps depends on the machine, with --steps not.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from data import Packed, Plan, heldout, stream
from model import DemoModel, Shape, fake_quant_q4
from safetensors.torch import load_file, save_file
from torch import Tensor

BALANCE_COEF = 0.005
MUON_LR, ADAM_LR = 0.02, 0.003
WEIGHT_DECAY = 0.01
SMOKE_SHAPE = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}


@torch.no_grad()
def orthogonalize(update: Tensor) -> Tensor:
    """Newton-Schulz iteration of Muon on a batch of matrices `[B, m, n]` with m <= n (quintic, five steps, bf16)."""
    x = update.bfloat16() if update.is_cuda else update.float()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.float()


class Muon:
    """Momentum, orthogonalized per matrix; parameters of one shape are handled as one batch."""

    def __init__(self, parameters: list[Tensor]):
        groups: dict[tuple[int, int], list[Tensor]] = defaultdict(list)
        for p in parameters:
            groups[(p.shape[-2], p.shape[-1])].append(p)
        self.groups = list(groups.values())
        self.momentum = [[torch.zeros_like(p) for p in group] for group in self.groups]

    @torch.no_grad()
    def step(self, lr: float, beta: float = 0.95) -> None:
        for group, momenta in zip(self.groups, self.momentum, strict=True):
            gradients = [p.grad for p in group]
            torch._foreach_lerp_(momenta, gradients, 1 - beta)
            nesterov = torch._foreach_lerp(gradients, momenta, beta)
            rows, columns = group[0].shape[-2:]
            batch = torch.cat([n.reshape(-1, rows, columns) for n in nesterov])
            flat = orthogonalize(batch if rows <= columns else batch.mT)
            updates = (flat if rows <= columns else flat.mT).split([p.numel() // (rows * columns) for p in group])
            scale = max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(group, 1 - lr * WEIGHT_DECAY)
            torch._foreach_add_(
                group, [u.reshape(p.shape) for u, p in zip(updates, group, strict=True)], alpha=-lr * scale
            )


@dataclass
class Batch:
    """One packed row on the device, with the targets shifted."""

    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    targets: Tensor
    weights: Tensor

    @classmethod
    def of(cls, packed: Packed, device: str) -> Batch:
        def put(array: object) -> Tensor:
            tensor = torch.as_tensor(array)
            return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor

        tokens = put(packed.tokens.astype("int64"))
        said = put(packed.said).float()
        # The first token of a document is never a target, so shifting cannot cross documents.
        return cls(tokens, put(packed.positions), put(packed.cu_seqlens), tokens.roll(-1), said.roll(-1))


def loss_of(model: DemoModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """Mean cross-entropy over the assistant's tokens, and the balance loss."""
    logits, balance = model(batch.tokens, batch.positions, batch.cu_seqlens)
    losses = F.cross_entropy(logits.float(), batch.targets, reduction="none")
    return (losses * batch.weights).sum() / batch.weights.sum().clamp(min=1), balance


class Trainer:
    """Model, optimizers and schedule; one `step` per batch."""

    def __init__(self, model: DemoModel, device: str, compile_model: bool):
        self.model = model.to(device)
        self.device = device
        matrices = [getattr(layer, n) for layer in model.layers for n in ("q", "k", "v", "o", "gate", "up", "down")]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.98), weight_decay=0.0)
        self.quantized = [p for layer in model.layers for p in (layer.gate, layer.up)]
        self.loss = torch.compile(loss_of, dynamic=False) if compile_model else loss_of

    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda")

    def step(self, batch: Batch, scale: float, rounded: bool) -> Tensor:
        """One update at `scale` times the peak rates; `rounded`: gradients at Q4_K-rounded gate/up weights."""
        masters = [p.detach().clone() for p in self.quantized] if rounded else []
        with torch.no_grad():
            for p in self.quantized if rounded else ():
                p.copy_(fake_quant_q4(p))
        with self.autocast():
            loss, balance = self.loss(self.model, batch)
        (loss + BALANCE_COEF * balance).backward()
        with torch.no_grad():
            for p, master in zip(self.quantized, masters, strict=False):
                p.copy_(master)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(MUON_LR * scale)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * scale
        self.adam.step()
        self.model.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> dict:
        return {"model": self.model.state_dict(), "adam": self.adam.state_dict(), "muon": self.muon.momentum}

    def load(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for mine, saved in zip(self.muon.momentum, state["muon"], strict=True):
            torch._foreach_copy_(mine, [s.to(self.device) for s in saved])

    @torch.no_grad()
    def score(self, batches: list[tuple[Packed, list[str]]]) -> dict[str, float]:
        """Share of held-out answers whose every token is the most likely one: those that greedy decoding gets right."""
        right: dict[str, list[int]] = defaultdict(list)
        for packed, skills in batches:
            batch = Batch.of(packed, self.device)
            with self.autocast():
                logits, _ = self.model(batch.tokens, batch.positions, batch.cu_seqlens)
            wrong = ((logits.argmax(-1) != batch.targets) & (batch.weights > 0)).long().cumsum(0)
            ends = batch.cu_seqlens[1 : len(skills) + 1].long() - 1
            totals = wrong[ends].diff(prepend=wrong.new_zeros(1))
            for skill, errors in zip(skills, totals.tolist(), strict=True):
                right[skill].append(int(errors == 0))
        return {skill: sum(hits) / len(hits) for skill, hits in right.items()}


def rate(progress: float) -> float:
    """Learning-rate factor: a short warm-up, level, then linear to zero from 45 % on."""
    return min(1.0, progress / 0.01 + 0.02, max(0.0, (1.0 - progress) / 0.55))


def save_weights(model: DemoModel, folder: Path) -> None:
    """BF16 weights in two files of the checkpoint layout (`export.py` merges them)."""
    state = model.hf_state()
    names = sorted(state)
    half = len(names) // 2
    for number, part in enumerate((names[:half], names[half:])):
        save_file({n: state[n] for n in part}, folder / f"weights-{number}.safetensors")


def load_weights(model: DemoModel, folder: Path) -> None:
    state: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state.update(load_file(file))
    model.load_hf_state(state)


def run(options: argparse.Namespace, trainer: Trainer, plan: Plan) -> None:
    """The loop: batches, schedule, log, periodic scores and checkpoints."""
    checkpoint = options.out / "checkpoint.pt"
    step, spent = 0, 0.0
    if options.resume and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=trainer.device, weights_only=True)
        trainer.load(saved)
        step, spent = saved["step"], saved["spent"]
    tests = heldout(Path(plan.tokenizer), options.eval_count, options.seed, plan.rows, plan.max_docs)
    started = logged = time.monotonic()
    window: list[Tensor] = []
    for packed in stream(plan, step // plan.batches, options.workers):
        if step == 1:  # compilation is over: the clock of --minutes starts here
            started = logged = time.monotonic()
        elapsed = spent + time.monotonic() - started
        progress = step / options.steps if options.steps else elapsed / (options.minutes * 60)
        if progress >= 1:
            break
        rounded = progress > 0.5 and step % 2 == 1
        window.append(trainer.step(Batch.of(packed, trainer.device), rate(progress) * options.lr_scale, rounded))
        step += 1
        if step % options.log_every == 0:
            mean = torch.stack(window).mean().item()
            now = time.monotonic()
            speed = len(window) * plan.rows / (now - logged)
            print(f"step {step} progress {progress:.3f} loss {mean:.4f} {speed / 1e3:.0f} k tok/s", flush=True)
            window, logged = [], now
        if step % options.eval_every == 0:
            print("scores", json.dumps({k: round(v, 3) for k, v in trainer.score(tests).items()}), flush=True)
            save_weights(trainer.model, options.out)
            torch.save({**trainer.state(), "step": step, "spent": elapsed}, checkpoint)
    torch.save({**trainer.state(), "step": step, "spent": spent + time.monotonic() - started}, checkpoint)
    save_weights(trainer.model, options.out)
    load_weights(trainer.model, options.out)  # scored as shipped: rounded to BF16
    print("final", json.dumps({"step": step, "tokens": step * plan.rows, "scores": trainer.score(tests)}), flush=True)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for weights and checkpoint")
    parser.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json (see tokenizer.py)")
    parser.add_argument("--minutes", type=float, default=20.0, help="training time; sets the schedule")
    parser.add_argument("--steps", type=int, default=0, help="number of steps instead of --minutes")
    parser.add_argument("--rows", type=int, default=65536, help="tokens per step")
    parser.add_argument("--workers", type=int, default=14, help="data processes, 0: in this process")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lr-scale", type=float, default=1.0)
    parser.add_argument("--resume", action="store_true", help="continue from OUT/checkpoint.pt")
    parser.add_argument("--init", type=Path, help="folder with weights to start from")
    parser.add_argument("--log-every", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--eval-count", type=int, default=200, help="held-out tasks per skill")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="tiny model, few steps, CPU")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() and not options.smoke else "cpu"
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    shape = Shape()
    if options.smoke:
        options.rows, options.workers, options.steps, options.no_compile = 1024, 0, options.steps or 12, True
        options.log_every, options.eval_every, options.eval_count = 4, 10**9, 1
        shape = Shape(**SMOKE_SHAPE)
    model = DemoModel(shape)
    if options.init:
        load_weights(model, options.init)
    # A document may be as long as a batch only if it fits: long ones are cut in the smoke run.
    plan = Plan(str(options.tokenizer), options.seed, options.rows, 2 if options.smoke else 16)
    run(options, Trainer(model, device, not options.no_compile and device == "cuda"), plan)


if __name__ == "__main__":
    main()
