"""Train the demo model's tower on drawn pictures, on two cores of a CPU; the language model stays as it is.

    python examples/demo_model/vision/train.py --checkpoint examples/demo_model/checkpoint --out build/eyes --minutes 30

First the tower learns to tell kinds and colours by heads of its own, then the answers' tokens through the language
model. OUT gets vision.safetensors every few minutes, and log.jsonl.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from data import CELL_SIZES, LABEL_SIZES, PLACEHOLDER, Sample, cell_labels, conversation, encode, labels, load_tokenizer
from draw import Place, Scene, draw_scene, random_scene
from losses import answer_loss, cell_loss, class_loss
from model import IMAGE_SIZE, FrozenLanguageModel, Tower, composite_config
from PIL import Image
from safetensors.torch import load_file, save_file
from table import load_table
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

FRESH, KEPT = 0.8, 8000  # share of pictures that are drawn anew; how many a process keeps for the others
GREY = (127, 127, 127)  # what LlavaImageProcessor pads with for a mean of 0.5


def spots_of(image: Image.Image, places: list[Place], squash: bool) -> list[tuple[float, float, float, float]]:
    """Middles and half sides of boxes in shares of the sides of what `pixels_of` makes of the picture."""
    wide, tall = image.size if squash else (max(image.size),) * 2
    left, top = (wide - image.width) / 2, (tall - image.height) / 2
    return [((x + left) / wide, (y + top) / tall, half / wide, half / tall) for x, y, half in places]


def pixels_of(image: Image.Image, squash: bool = False) -> np.ndarray:
    """uint8 [3, 96, 96] as the model's processor makes them before it scales them to -1 .. 1 (a test compares them).

    squash: bring both sides to 96 instead of padding to a square, as other programs do.
    """
    side = max(image.size)
    if image.size != (side, side) and not squash:
        padded = Image.new("RGB", (side, side), GREY)
        padded.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
        image = padded
    return np.asarray(image.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BICUBIC)).transpose(2, 0, 1)


class Drawings(IterableDataset):
    """Batches of pictures with labels and, unless it is for the warm-up, conversations."""

    def __init__(self, seed: str, batch: int, tokenizer: Tokenizer | None):
        self.seed, self.batch, self.tokenizer = seed, batch, tokenizer

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor, list[Sample]]]:
        torch.set_num_threads(1)
        worker = torch.utils.data.get_worker_info()
        rng = random.Random(f"{self.seed}/{worker.id if worker else 0}")
        kept: list[tuple[Scene, np.ndarray, list[list[int]]]] = []
        while True:
            pixels, targets, cells, samples = [], [], [], []
            for _ in range(self.batch):
                if len(kept) > KEPT // 16 and rng.random() > FRESH:
                    scene, drawn, found = rng.choice(kept)
                else:
                    scene, drawn, found = self.draw(rng)
                    if len(kept) < KEPT:
                        kept.append((scene, drawn, found))
                    else:
                        kept[rng.randrange(KEPT)] = (scene, drawn, found)
                pixels.append(drawn)
                targets.append(labels(scene))
                cells.append(found)
                if self.tokenizer is not None:
                    samples.append(encode(self.tokenizer, conversation(rng, scene)))
            yield torch.from_numpy(np.stack(pixels)), torch.tensor(targets), torch.tensor(cells), samples

    def draw(self, rng: random.Random) -> tuple[Scene, np.ndarray, list[list[int]]]:
        scene = random_scene(rng)
        image, places = draw_scene(rng, scene)
        squash = rng.random() < 0.2
        return scene, pixels_of(image, squash), cell_labels(scene, spots_of(image, places, squash))


class Run:
    """The tower, its optimizer, and what has been logged."""

    def __init__(self, options: argparse.Namespace, rank: int):
        self.options, self.rank = options, rank
        tokenizer = load_tokenizer(options.checkpoint)
        self.image_id = tokenizer.token_to_id(PLACEHOLDER)
        self.language = FrozenLanguageModel(options.checkpoint)
        self.tower = Tower(composite_config(self.language.config, self.image_id), LABEL_SIZES, CELL_SIZES)
        if options.start:
            self.tower.load_state_dict(load_file(options.start))
        else:
            drawings = Drawings(options.seed, 400, None)
            self.tower.whiten(next(iter(drawings))[0].float() / 127.5 - 1)
        self.table = load_table(options.table) if options.table else None
        if self.table is not None:
            rng = random.Random("spread")
            self.spread = self.table(torch.tensor([labels(random_scene(rng)) for _ in range(500)])).var(0).mean()
        self.tokenizer, self.began, self.saved = tokenizer, time.time(), time.time()
        named = dict(self.tower.named_parameters())
        inner = [p for name, p in named.items() if p.ndim == 2 and not name.startswith(("heads.", "cells."))]
        others = [p for name, p in named.items() if not any(p is one for one in inner)]
        self.optimizers = (
            torch.optim.Muon(inner, lr=options.rate, weight_decay=0.02, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=options.rate, weight_decay=0.0, betas=(0.9, 0.98)),
        )

    def train(self, is_warm_up: bool, seconds: float) -> None:
        """Steps until `seconds` are over; the learning rate rises for 100 steps and falls to a twentieth."""
        options = self.options
        drawings = Drawings(
            f"{options.seed}/{is_warm_up}/{self.rank}", options.batch, None if is_warm_up else self.tokenizer
        )
        loader = iter(DataLoader(drawings, batch_size=None, num_workers=1, prefetch_factor=6))
        began, step, spent, means = time.time(), 0, 0.0, []
        peak = options.rate if is_warm_up else options.rate * options.second_rate
        while spent < seconds:
            floor = 0.3 if is_warm_up else 0.03
            falling = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, spent / seconds)))
            for group in (group for one in self.optimizers for group in one.param_groups):
                group["lr"] = peak * min(1.0, (step + 1) / 100) * falling
            pixels, targets, cells, samples = next(loader)
            with torch.autocast("cpu", torch.bfloat16):
                positions, seen = self.tower(pixels.float() / 127.5 - 1)
                loss, right = class_loss(self.tower, seen, targets)
                local = cell_loss(self.tower, seen, cells)
                loss = loss + 2 * local
                apart = torch.zeros(())
                if self.table is not None:  # in shares of what differs between pictures
                    apart = F.mse_loss(positions.float(), self.table(targets)) / self.spread
                    loss = loss + options.near * apart
            spoken = torch.zeros(())
            if not is_warm_up:
                spoken = self.answers(positions, samples)
                loss = spoken + options.aux * loss
            self.tower.zero_grad()
            loss.backward()
            spent = self.share_gradients(time.time() - began)
            torch.nn.utils.clip_grad_norm_(self.tower.parameters(), 1.0)
            for one in self.optimizers:
                one.step()
            step += 1
            means.append([loss.item(), spoken.item(), local.item(), apart.item(), *right])
            if step % 50 == 0:
                if self.table is not None:  # table.py may run beside
                    self.table = load_table(options.table)
                self.log(is_warm_up, step, np.nanmean(means, 0))
                means = []
        self.save()

    def answers(self, positions: Tensor, samples: list[Sample]) -> Tensor:
        """The loss of some of the conversations, which are about as long: the language model costs the most."""
        order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
        first = random.randrange(len(samples) - self.options.spoken + 1)
        chosen = order[first : first + self.options.spoken]
        return answer_loss(self.language, positions[chosen], [samples[i] for i in chosen], self.image_id)

    def share_gradients(self, seconds: float) -> float:
        """Average the gradients of all processes, and the seconds, by which they stop at the same step."""
        gradients = [p.grad for p in self.tower.parameters() if p.grad is not None]
        flat = torch.cat([*(one.flatten() for one in gradients), torch.tensor([seconds])])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for one, part in zip(gradients, flat[:-1].split([one.numel() for one in gradients]), strict=True):
            one.copy_(part.view_as(one))
        return float(flat[-1])

    def log(self, is_warm_up: bool, step: int, means: np.ndarray) -> None:
        names = ("loss", "answers", "cells", "apart", "kinds", "colours", "digits")
        if self.rank:
            return
        line = {"phase": 1 if is_warm_up else 2, "step": step, "s": round(time.time() - self.began)}
        line |= {name: round(float(value), 4) for name, value in zip(names, means, strict=True)}
        print(json.dumps(line), flush=True)
        with (self.options.out / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        if time.time() - self.saved > 120:
            self.save()

    def save(self) -> None:
        self.saved = time.time()
        if self.rank:
            return
        save_file(self.tower.checkpoint(), self.options.out / "vision.safetensors", metadata={"format": "pt"})
        save_file(
            {k: v.contiguous() for k, v in self.tower.state_dict().items()}, self.options.out / "tower.safetensors"
        )


def work(rank: int, options: argparse.Namespace) -> None:
    """One process. Threads that share a product wait for each other, processes only for gradients: on cores that others
    use, too, two of one thread are four times as fast as one of two."""
    os.setsid()  # Linux shares processors among sessions: one for each process
    torch.set_num_threads(1)
    torch.manual_seed(1)
    random.seed(f"{options.seed}/{rank}")
    dist.init_process_group(
        "gloo", init_method=f"file://{options.out.resolve()}/rendezvous", rank=rank, world_size=options.processes
    )
    run = Run(options, rank)
    if options.warm_up_minutes:
        run.train(True, 60 * options.warm_up_minutes)
    if options.minutes:
        run.train(False, 60 * options.minutes)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="tower.safetensors of an earlier run")
    parser.add_argument("--table", type=Path, help="table.safetensors of table.py, whose rows the positions are to be")
    parser.add_argument("--near", type=float, default=2.0, help="share of the distance from them in the loss")
    parser.add_argument("--warm_up_minutes", type=float, default=8)
    parser.add_argument("--minutes", type=float, default=25, help="after the warm-up")
    parser.add_argument("--batch", type=int, default=32, help="pictures of a process in a step")
    parser.add_argument("--spoken", type=int, default=8, help="of them, with which the language model answers")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--second_rate", type=float, default=0.8, help="times --rate: the peak after the warm-up")
    parser.add_argument("--aux", type=float, default=0.5, help="share of the heads' loss after the warm-up")
    parser.add_argument("--processes", type=int, default=2, help="each on one thread, with a batch of its own")
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "rendezvous").unlink(missing_ok=True)
    torch.multiprocessing.spawn(work, (options,), options.processes)


if __name__ == "__main__":
    main()
