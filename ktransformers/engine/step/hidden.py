"""Hidden states of a model's last layer, after its norm: what embeddings are made of. Knows modules, not prompts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from typing_extensions import override

from ktransformers.core import EmbeddingForm, Pooling
from ktransformers.engine.damage.errors import NotFiniteError
from ktransformers.errors import ConfigError, UnsupportedError, reason_of
from ktransformers.operators.recorder import fp32_copy, intercepted

__all__ = ["HiddenStatesHook", "LastHiddenHook", "LayersHiddenHook", "Pooled", "embedding_form"]

_MODULES, _POOLING = "modules.json", "1_Pooling/config.json"
_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}
_POOLINGS = {
    "pooling_mode_cls_token": Pooling.FIRST,
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "cls": Pooling.FIRST,  # as sentence-transformers 5 writes it
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
}
_UNSPECIFIED = -1
_GGUF_POOLINGS = {
    gguf.PoolingType.CLS: Pooling.FIRST,
    gguf.PoolingType.LAST: Pooling.LAST,
    gguf.PoolingType.MEAN: Pooling.MEAN,
}


def _hidden_states(base: torch.nn.Module, take: Callable[[torch.Tensor], None]) -> AbstractContextManager[None]:
    """Call `take` with the hidden states, [T, H], of every step that a decoder runs meanwhile."""

    def run(key: None, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        take(output.last_hidden_state[0])
        return output

    return intercepted([(None, base)], run)


class HiddenStatesHook:
    """Shows the hidden states of a causal LM of `transformers`, whose operators may be ours. While it is open, steps
    must not be replayed."""

    def __init__(self, model: Any):
        self._model = model
        self.is_open = False

    @contextmanager
    def watch(self) -> Iterator[list[torch.Tensor]]:
        """Yield a list that gets the hidden states of every step that runs meanwhile: fp32 [T, H] on the CPU.

        Raises UnsupportedError for a model without a decoder of its own.
        """
        base = getattr(self._model, "base_model", None)
        if base is None or base is self._model:
            raise UnsupportedError("this model shows no hidden states: it makes no embeddings")
        seen: list[torch.Tensor] = []
        self.is_open = True
        try:
            with _hidden_states(base, lambda rows: seen.append(fp32_copy(rows))):
                yield seen
        finally:
            self.is_open = False


class LastHiddenHook:
    """Keeps the hidden states behind the last norm of each step, on the device that computes them, for a drafter.

    Steps that are replayed run no Python: what is captured copies their rows to memory of their own. replayed_rows:
    most rows of such steps, set before anything is captured; 0: there are none. is_normed: False for those in front of
    the last norm, which is called `norm`, or of what stands in front of it; streams are side by side then.
    """

    def __init__(self, model: Any, norm: str = "norm", *, is_normed: bool = True):
        self.replayed_rows, self.is_normed, self._norm = 0, is_normed, norm
        self._replayed: torch.Tensor | None = None  # [replayed_rows, H]
        self._latest: torch.Tensor | None = None  # of a step that was not replayed
        self._base = model.base_model

    def open(self) -> AbstractContextManager[None]:
        """Keep what the model's own forward computes meanwhile: only for as long as that runs, since a model that is
        watched keeps steps from being fused."""
        if self.is_normed:
            return _hidden_states(self._base, self.keep)
        norm = getattr(getattr(self._base, "inner", self._base), self._norm)

        def run(key: None, forward: Callable[..., Any], /, rows: torch.Tensor) -> Any:
            self.keep(rows[0].flatten(1))
            return forward(rows)

        return intercepted([(None, norm)], run)

    def begin(self) -> None:
        """Forget the step before."""
        self._latest = None

    def keep(self, rows: torch.Tensor) -> None:
        """Keep the step's hidden states, [T, H]."""
        count = rows.shape[0]
        if count > self.replayed_rows:
            self._latest = rows
            return
        if self._replayed is None:  # before anything is captured: what is captured runs once before
            self._replayed = torch.empty(self.replayed_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
        self._replayed[:count].copy_(rows)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return a copy of the last step's hidden states of `count` rows, [count, H] where they were computed, in the
        type of that device."""
        return self._kept()[first : first + count].clone()

    def rows_at(self, indices: Sequence[int]) -> torch.Tensor:
        """Return a copy of the last step's hidden states of single rows, as `rows` does: [len(indices), H]."""
        kept = self._kept()
        if list(indices) == list(range(len(indices))):
            return kept[: len(indices)].clone()
        return torch.cat([kept[index : index + 1] for index in indices])  # an index would have to be copied to a GPU

    def _kept(self) -> torch.Tensor:
        kept = self._replayed if self._latest is None else self._latest
        assert kept is not None, "no step has run"
        return kept


class LayersHiddenHook(LastHiddenHook):
    """Keeps the hidden states behind some layers of each step, side by side in the order of the layers: [T, layers H].
    Of layers with streams [1, T, N, H] their mean (DeepSeek's inference code: `h.mean(dim=2)`)."""

    def __init__(self, model: torch.nn.Module, layers: Sequence[int]):
        super().__init__(model, is_normed=False)
        self._layers = tuple(layers)

    @override
    def open(self) -> AbstractContextManager[None]:
        """Keep what the layers give while the model's own forward runs."""
        layers, found = getattr(self._base, "inner", self._base).layers, dict[object, torch.Tensor]()

        def run(number: object, forward: Callable[..., object], /, *args: object, **kwargs: object) -> object:
            output = forward(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            assert isinstance(hidden, torch.Tensor), "a layer gives hidden states"
            rows = hidden[0]
            # Layers behind this one may change their input in place: a mean is a tensor of its own.
            found[number] = rows.mean(dim=1) if rows.dim() == 3 else rows.clone()
            if number == self._layers[-1]:
                self.keep(torch.cat([found[each].to(rows.device) for each in self._layers], dim=-1))
            return output

        return intercepted([(number, layers[number]) for number in self._layers], run)


class Pooled:
    """The pooled vector of a sequence, from the hidden states of its tokens in their order: `add` them, then ask."""

    def __init__(self, pooling: Pooling):
        self._pooling, self._len = pooling, 0
        self._sum: np.ndarray[Any, np.dtype[np.float64]] | float = 0.0

    def add(self, hidden_states: torch.Tensor) -> None:
        """Add the hidden states of the next T tokens, fp32 [T, H]."""
        rows = hidden_states.numpy()
        if self._pooling is Pooling.MEAN:
            self._sum = self._sum + rows.sum(0, dtype=np.float64)
            self._len += len(rows)
        elif len(rows) and not (self._pooling is Pooling.FIRST and self._len):
            row = rows[0 if self._pooling is Pooling.FIRST else -1]
            self._sum, self._len = row.astype(np.float64), 1

    def vector(self) -> bytes:
        """Return the pooled vector as fp32 [H], little-endian. Raises NotFiniteError where a token's hidden state is no
        number, though the last token's logits may be good: windows of attention end, and a mean is of all tokens."""
        vector = np.asarray(self._sum / self._len)
        is_bad = ~np.isfinite(vector)
        if is_bad.any():
            at = int(is_bad.argmax())
            raise NotFiniteError(float(vector[at]), f"number {at} of a prompt's embedding")
        return vector.astype("<f4").tobytes()


def embedding_form(pooling_type: object, *paths: Path | None) -> EmbeddingForm:
    """Return how a model wants its embeddings, in the form of sentence-transformers in one of its folders, else of its
    GGUF.

    pooling_type: the GGUF's; None: it does not say. Raises ConfigError for files that cannot be read.
    """
    for path in paths:
        if path is not None and ((path / _MODULES).is_file() or (path / _POOLING).is_file()):
            return _form_in(path)
    if pooling_type is None or pooling_type == _UNSPECIFIED:
        return EmbeddingForm()
    if not isinstance(pooling_type, int):
        raise ConfigError(f"the GGUF's pooling_type is {pooling_type!r:.40}, not a number")
    return EmbeddingForm(_GGUF_POOLINGS.get(pooling_type))


def _form_in(folder: Path) -> EmbeddingForm:
    """modules.json names the steps from hidden states to the vector; without it there is a pooling."""
    pooling_file, normalizes = folder / _POOLING, True
    if (folder / _MODULES).is_file():
        modules = [one for one in _json_of(folder / _MODULES, list) if isinstance(one, dict)]
        kinds = [str(one.get("type")).rpartition(".")[2] for one in modules]
        if not set(kinds) <= _KNOWN_MODULES:
            return EmbeddingForm(None)  # Dense, say: more weights than the model's
        normalizes = "Normalize" in kinds
        if "Pooling" in kinds:
            pooling_file = folder / str(modules[kinds.index("Pooling")].get("path")) / "config.json"
    if not pooling_file.is_file():
        return EmbeddingForm(normalizes=normalizes)
    config = _json_of(pooling_file, dict)
    chosen = {name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on is True}
    mode = config.get("pooling_mode") or (chosen.pop() if len(chosen) == 1 else None)
    return EmbeddingForm(_POOLINGS.get(str(mode)), normalizes)


def _json_of(file: Path, kind: type) -> Any:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of(error)}") from error
    if not isinstance(found, kind):
        raise ConfigError(f"{file} cannot be read: it holds no {kind.__name__}")
    return found
