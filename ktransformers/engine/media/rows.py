"""Pictures in the rows of a step: which of a run's positions show which part of what, and where they are turned to.

    run    prompt 17 23 P0 P1 P2 P3 29 ...     P: pseudo-ids, whose ordinal in the picture is that of its hidden states
    step   rows of some runs ──> PictureRows, and rotary positions: [T], or time, height and width, [3, T]

Knows sequences and features, no model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from ktransformers.engine.media.family import PictureFamily
from ktransformers.engine.media.features import PictureEncoder, PictureFeatures
from ktransformers.errors import MODULE_FAILURES, EngineError, KTransformersError, named_reason
from ktransformers.media.records import MEDIA_ID_BASE, Sight, media_ids, whole_stretches
from ktransformers.operators.context import PictureRows
from ktransformers.scheduler.records import NewSequence

__all__ = ["PICTURE_FAILURES", "RunPictures", "StepRow", "pictures_in", "why_failed"]

PICTURE_FAILURES = (KTransformersError, *MODULE_FAILURES)
"""What pictures that cannot be had may raise: towers are modules of transformers."""

StepRow = tuple["RunPictures | None", int, int]
"""A row of a step: the pictures of its run, its first position, and the one behind its last."""


class RunPictures:
    """The pictures of one run, and the rotary positions of its tokens.

    Raises EngineError for pictures whose positions are not known, or are not those of the prompt's ids. token_ids: of
    the run, with a token in the place of each pseudo-id. prompt_len: how many are of its prompt. shift: what rotary
    positions behind the prompt are further than indices.
    """

    def __init__(self, start: NewSequence, encoder: PictureEncoder):
        prompt = np.array(start.token_ids[: start.prompt_len], dtype=np.int64)
        self.prompt_len = start.prompt_len
        self._encoder, self._media, self._prompt_ids = encoder, start.media, prompt
        self._at = np.flatnonzero(prompt >= MEDIA_ID_BASE)  # positions that show something
        self._items = np.zeros(len(self._at), dtype=np.int64)  # of which picture
        self._ordinals = np.zeros(len(self._at), dtype=np.int64)  # which of its positions
        self._counts: list[int] = []  # of positions, by picture
        for index, item in enumerate(self._media):
            first, end = np.searchsorted(self._at, (item.start, item.end)).tolist()
            self._items[first:end], self._ordinals[first:end] = index, np.arange(end - first)
            self._counts.append(end - first)
            if prompt[self._at[first:end]].tolist() != media_ids(item.digest, end - first):
                raise EngineError(f"picture {index}: its positions do not have the ids of {item.digest.hex()}")
        if sum(self._counts) != len(self._at):
            raise EngineError("the prompt has positions of pictures that it does not name")
        stretches = whole_stretches(prompt.tolist(), self._media, encoder.family.sight)
        self._seeing = self._at[:0]  # positions that see what is behind them
        if stretches:
            parts = stretches if encoder.family.sight is not Sight.PICTURES else [(i.start, i.end) for i in self._media]
            self._seeing = np.concatenate([np.arange(first, end) for first, end in parts])
        inside = np.concatenate([np.arange(first, end) for first, end in stretches]) if stretches else self._seeing
        self._gaps = np.setdiff1d(inside, self._seeing)
        self._starts, self._ends = np.empty_like(self._seeing), np.empty_like(self._seeing)  # of the stretch around it
        for first, end in stretches:
            part = slice(*np.searchsorted(self._seeing, (first, end)))
            self._starts[part], self._ends[part] = first, end
        around = encoder.family.around
        self._routed = None if around is None else np.union1d(self._at, np.flatnonzero(np.isin(prompt, [*around])))
        self._features: dict[int, PictureFeatures] = {}
        self._spent = 0, 0.0
        self.token_ids = [encoder.family.token_id if one >= MEDIA_ID_BASE else one for one in start.token_ids]
        self._axes: npt.NDArray[np.int64] | None = None
        self.shift = 0
        axes = encoder.positions(start.token_ids[: start.prompt_len], self._media)
        if axes is not None:
            if tuple(axes.shape) != (3, len(prompt)) or not 0 <= int(axes.min()) <= int(axes.max()) < len(prompt):
                raise EngineError(  # tables of angles are as long as sequences
                    f"rotary positions {tuple(axes.shape)} from {int(axes.min())} to {int(axes.max())} of a prompt of "
                    f"{len(prompt)} tokens"
                )
            self._axes = axes.cpu().long().numpy()
            self.shift = int(self._axes.max()) + 1 - len(prompt)
        self._uneven = self._at[:0] if self._axes is None else np.flatnonzero((self._axes != self._axes[0]).any(0))

    def take_spent(self) -> tuple[int, float]:
        """Return how many pictures the tower has computed since the last call, and the seconds that it took."""
        spent, self._spent = self._spent, (0, 0.0)
        return spent

    @property
    def prompt_tokens(self) -> list[int]:
        """The tokens of the prompt, without the positions that show something."""
        return np.delete(self._prompt_ids, self._at).tolist()

    def is_shown(self, position: int) -> bool:
        """Whether a position shows a part of a picture."""
        return _some_in(self._at, position, position + 1)

    def is_plain(self, start: int, end: int, pool: int = 1, ahead: int = 0) -> bool:
        """Whether positions from `start` to before `end` have one rotary position each, which follows that of
        `pool` - 1 positions before, and those `ahead` behind them show nothing."""
        if _some_in(self._at, start + ahead, end + ahead) or any(
            places is not None and _some_in(places, start, end) for places in (self._uneven, self._seeing, self._routed)
        ):
            return False
        if pool == 1 or self._axes is None:
            return True
        turned = self.positions(max(start + 1 - pool, 0), end)
        return bool((np.diff(turned) == 1).all())

    def positions(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return rotary positions, [3, end - start]; of places in front of the first, that of the first."""
        places = np.arange(start, end).clip(min=0)
        if self._axes is None:
            return np.broadcast_to(places, (3, end - start)).copy()
        known: npt.NDArray[np.int64] = self._axes[:, places.clip(max=self.prompt_len - 1)]
        return np.where(places < self.prompt_len, known, places + self.shift)

    def shown(self, start: int, end: int) -> list[tuple[npt.NDArray[np.int64], PictureFeatures, npt.NDArray[np.int64]]]:
        """Return, of each picture with positions from `start` to before `end`: these, counted from `start`, its
        features, and which of them they show. Raises what the encoder raises, and EngineError for features of another
        number of positions."""
        first, last = np.searchsorted(self._at, (start, end)).tolist()
        items, found = self._items[first:last], []
        for item in dict.fromkeys(items.tolist()):
            mine = np.flatnonzero(items == item) + first
            found.append((self._at[mine] - start, self._features_of(item), self._ordinals[mine]))
        self._features = {item: one for item, one in self._features.items() if self._media[item].end > end}
        return found

    def routed(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return the positions that are routed to experts for pictures, counted from `start`."""
        if self._routed is None:
            return self._at[:0]
        return self._routed[slice(*np.searchsorted(self._routed, (start, end)))] - start

    def gaps(self, start: int, end: int) -> npt.NDArray[np.int64]:
        """Return positions between pictures that see each other, where rows from `start` to before `end` may not see
        them."""
        return self._gaps[self._gaps > start] if _some_in(self._seeing, start, end) else self._gaps[:0]

    def _features_of(self, item: int) -> PictureFeatures:
        """Kept until all of the picture is computed, whatever the encoder forgets meanwhile."""
        if item not in self._features:
            self._features[item] = found = self._encoder.features(self._media[item].digest)
            count, seconds = self._spent
            self._spent = count + (found.seconds > 0), seconds + found.seconds
        features = self._features[item]
        if len(features.hidden) != self._counts[item]:
            raise EngineError(
                f"the tower gives {len(features.hidden)} hidden states for a picture of {self._counts[item]} positions"
            )
        return features

    def bounds(self, start: int, end: int) -> tuple[npt.NDArray[np.int64], ...]:
        """Return the positions that see what is behind them, counted from `start`, and first and last + 1 of the
        stretch that each is in."""
        part = slice(*np.searchsorted(self._seeing, (start, end)))
        return self._seeing[part] - start, self._starts[part], self._ends[part]


def why_failed(error: Exception) -> str:
    """Return what a request's sender is told of a picture that cannot be had."""
    why = str(error) if isinstance(error, KTransformersError) else named_reason(error)
    return f"a picture of the prompt cannot be used: {why}"


def _some_in(positions: npt.NDArray[np.int64], start: int, end: int) -> bool:
    first, last = np.searchsorted(positions, (start, end))
    return bool(last > first)


def pictures_in(
    rows: Sequence[StepRow],
    positions: torch.Tensor,
    kv_lens: torch.Tensor,
    family: PictureFamily,
    pool: int = 1,
    ahead: int = 0,
) -> tuple[torch.Tensor, PictureRows | None, list[tuple[int, str]]]:
    """Put pictures into a step: return its rotary positions, what shows pictures in it, and (row, why) of rows whose
    pictures cannot be had, which are computed without them.

    positions: int64 [T], indices. kv_lens: int32 [T]. pool: positions of pools that layers rotate; 1: they have none.
    ahead: how far behind its own position a row's token stands, of layers for multi-token prediction. Positions come
    back as [3, T] where some row needs them.
    """
    turned = np.broadcast_to(positions.numpy(), (3, len(positions))).copy()
    ends, starts, back = kv_lens.clone(), kv_lens - 1, (turned + 1 - pool).clip(min=0)
    parts = list[tuple[npt.NDArray[np.int64], PictureFeatures, npt.NDArray[np.int64]]]()
    routed, gaps = list[npt.NDArray[np.int64]](), list[npt.NDArray[np.int64]]()
    failed, is_plain, first = list[tuple[int, str]](), True, 0
    for index, (pictures, start, end) in enumerate(rows):
        if pictures is not None and start >= pictures.prompt_len + pool - 1:
            turned[:, first : first + end - start] += pictures.shift
            back[:, first : first + end - start] += pictures.shift
        elif pictures is not None:
            turned[:, first : first + end - start] = pictures.positions(start, end)
            back[:, first : first + end - start] = pictures.positions(start + 1 - pool, end + 1 - pool)
            is_plain &= pictures.is_plain(start, end, pool, ahead)
            try:
                shown = pictures.shown(start + ahead, end + ahead)
                parts += [(at + first, features, which) for at, features, which in shown]
            except PICTURE_FAILURES as error:
                failed.append((index, why_failed(error)))
            routed.append(pictures.routed(start, end) + first)
            apart = pictures.gaps(start, end)
            gaps.append(np.stack([np.full_like(apart, index), apart]))
            at, begins, stops = map(torch.from_numpy, pictures.bounds(start, end))
            ends[at + first], starts[at + first] = stops.to(ends.dtype), begins.to(starts.dtype)
        first += end - start
    if is_plain:
        return torch.from_numpy(turned[0].copy()), None, failed
    is_even = bool((turned == turned[0]).all())
    axes = torch.from_numpy(turned[0].copy() if is_even else turned)
    made = PictureRows(*_joined(parts), pool_starts=torch.from_numpy(back) if pool > 1 else None)
    made = replace(made, added_to=family.added_to)
    if family.around is not None:
        made = replace(made, routed=torch.from_numpy(np.concatenate(routed)))
    if family.sight is not Sight.NOTHING:
        in_full, in_windows = family.ends_in_full, family.ends_in_windows
        made = replace(made, ends=ends, ends_in_full=in_full, ends_in_windows=in_windows)
        made = replace(made, starts=starts if family.keeps_starts else None)
        if any(apart.size for apart in gaps):
            made = replace(made, gaps=torch.from_numpy(np.concatenate(gaps, axis=1)))
    return axes, made, failed


def _joined(
    parts: Sequence[tuple[npt.NDArray[np.int64], PictureFeatures, npt.NDArray[np.int64]]],
) -> tuple[torch.Tensor, torch.Tensor, dict[int, torch.Tensor]]:
    """Rows, hidden states and what is added by layer, as PictureRows has them."""
    if not parts:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, 0), {}
    rows = torch.from_numpy(np.concatenate([at for at, *_ in parts]))

    def taken(of: torch.Tensor, which: npt.NDArray[np.int64]) -> torch.Tensor:
        return of[torch.from_numpy(which).to(of.device)]

    hidden = torch.cat([taken(features.hidden, which) for _, features, which in parts])
    layers = parts[0][1].by_layer
    return rows, hidden, {i: torch.cat([taken(one.by_layer[i], which) for _, one, which in parts]) for i in layers}
