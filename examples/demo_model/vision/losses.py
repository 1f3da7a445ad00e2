"""What the tower and the table are trained by. It knows nothing of files and of optimizers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from data import Sample
from model import FrozenLanguageModel, Tower
from torch import Tensor


def answer_loss(language: FrozenLanguageModel, positions: Tensor, samples: list[Sample], image_id: int) -> Tensor:
    """Mean cross entropy of the answers' tokens."""
    longest = max(len(one.ids) for one in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    said = torch.zeros(len(samples), longest, dtype=torch.bool)
    for row, one in enumerate(samples):
        ids[row, : len(one.ids)] = torch.tensor(one.ids)
        said[row, : len(one.ids)] = torch.tensor(one.is_answer)
    x = F.embedding(ids, language.embed).float()
    x = x.masked_scatter((ids == image_id)[..., None], positions.float())
    wanted = said[:, 1:]
    rows = (torch.arange(len(samples))[:, None] * longest + torch.arange(longest - 1))[wanted]
    return F.cross_entropy(language.logits(x, rows), ids[:, 1:][wanted])


def class_loss(tower: Tower, local: Tensor, targets: Tensor) -> tuple[Tensor, list[float]]:
    """The heads' loss, and the share of right kinds, colours and digits."""
    logits = tower.classes(local)
    loss = sum(F.cross_entropy(one.float(), targets[:, i]) for i, one in enumerate(logits))
    right = torch.stack([one.argmax(-1) == targets[:, i] for i, one in enumerate(logits)], 1)
    groups = (right[:, [0, 2, 4]], right[:, [1, 3, 5]], right[targets[:, 6] > 0][:, 6:])
    return loss / len(logits), [group.all(1).float().mean().item() for group in groups]  # type: ignore[union-attr,return-value]


def cell_loss(tower: Tower, local: Tensor, cells: Tensor) -> Tensor:
    """The loss of the positions' heads; positions with nothing count a fifth."""
    flat = cells.flatten(0, 1)
    weights = torch.where(flat[:, 0] > 0, 1.0, 0.2)
    parts = [
        F.cross_entropy(one.float(), flat[:, i], reduction="none") for i, one in enumerate(tower.cell_classes(local))
    ]
    return (torch.stack(parts).mean(0) * weights).sum() / weights.sum()
