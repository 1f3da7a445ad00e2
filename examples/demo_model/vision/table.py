"""Which 16 rows the language model, as it is, answers questions about a picture from: found without pictures.

    python examples/demo_model/vision/table.py --checkpoint examples/demo_model/checkpoint --out build/eyes

The language model can look values up in a table of `key: value` lines. So a picture's positions start as the tokens of
such a table, as sums of one row per class of what it shows, and these are trained through the language model: no
picture is drawn, and the tower then learns to make the same rows.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path

import torch
from data import LABEL_SIZES, NUM_POSITIONS, PLACEHOLDER, conversation, encode, labels, load_tokenizer
from draw import COLOURS, SHAPES, random_scene
from losses import answer_loss
from model import FrozenLanguageModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

START = "picture: red circle\ncolor: red\nshape: circle\n\n"  # as many tokens as a picture has positions


class Table(nn.Module):
    """Rows for the language model by the labels of `data.labels`."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.zeros(NUM_POSITIONS, 256))
        self.rows = nn.ParameterList(nn.Parameter(torch.zeros(size, NUM_POSITIONS, 256)) for size in LABEL_SIZES)

    @torch.no_grad()
    def start(self, tokenizer: Tokenizer, embed: Tensor) -> None:
        """The embeddings of START, with the kind and the colour of the first thing in their places."""
        embed = embed.float()
        found = tokenizer.encode(START)
        self.base.copy_(embed[found.ids])
        words = {"Ġred": (self.rows[1], tuple(COLOURS)), "Ġcircle": (self.rows[0], (*SHAPES, "digit"))}
        for place, token in enumerate(found.tokens):
            if token in words:
                rows, names = words[token]
                self.base[place] = 0
                for index, name in enumerate(names):
                    rows[index + 1, place] = embed[tokenizer.encode(f" {name}").ids].mean(0)

    def forward(self, targets: Tensor) -> Tensor:
        """`targets [B, labels]` -> `[B, 16, 256]`."""
        return self.base + sum(rows[targets[:, i]] for i, rows in enumerate(self.rows))


def load_table(file: Path) -> Table:
    table = Table().requires_grad_(False)
    table.load_state_dict(load_file(file))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="table.safetensors of an earlier run")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--rate", type=float, default=0.02)
    parser.add_argument("--seed", default="1")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer, language = load_tokenizer(options.checkpoint), FrozenLanguageModel(options.checkpoint)
    table = Table()
    table.start(tokenizer, language.embed)
    if options.start:
        table.load_state_dict(load_file(options.start))
    optimizer = torch.optim.AdamW(table.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0)
    rng, began, step, losses = random.Random(f"table/{options.seed}"), time.time(), 0, []
    while (spent := (time.time() - began) / (60 * options.minutes)) < 1:
        optimizer.param_groups[0]["lr"] = options.rate * min(1.0, (step + 1) / 20) * (0.05 + 0.95 * (1 - spent))
        scenes = [random_scene(rng) for _ in range(options.batch)]
        samples = [encode(tokenizer, conversation(rng, scene)) for scene in scenes]
        rows = table(torch.tensor([labels(scene) for scene in scenes])).to(torch.bfloat16)
        loss = answer_loss(language, rows, samples, tokenizer.token_to_id(PLACEHOLDER))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        losses.append(loss.item())
        if step % 20 == 0:
            print(
                f"step {step}, {spent * 60 * options.minutes:.0f} s, loss {sum(losses) / len(losses):.4f}", flush=True
            )
            losses = []
            save_file({k: v.contiguous() for k, v in table.state_dict().items()}, options.out / "table.part")
            (options.out / "table.part").rename(options.out / "table.safetensors")  # train.py may read it meanwhile


if __name__ == "__main__":
    main()
