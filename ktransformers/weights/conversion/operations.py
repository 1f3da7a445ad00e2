"""The operations by which `transformers` makes parameters of stored tensors, for everything but routed experts.

`transformers.core_model_loading` has a class for each, whose name an Origin keeps. They move elements and compute
nothing, so that one function does for tensors with values and, on torch's meta device, for shapes alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ktransformers.errors import TensorMismatchError, UnsupportedError
from ktransformers.weights.conversion.checkpoint_names import Origin

__all__ = ["CONVERSIONS", "converted", "converted_shape", "sizes_of"]

Sizes = Sequence[int]
"""Of all targets of a split, in order, along its dimension."""


def converted(parts: Sequence[torch.Tensor], origin: Origin, sizes: Sizes) -> torch.Tensor:
    """Return the parameter that `origin` makes of its sources' values; a view of them where nothing is moved.

    sizes: see `sizes_of`. Raises UnsupportedError for an operation that is not known here, TensorMismatchError for
    shapes that do not fit it.
    """
    for operation, dim in zip(origin.operations, origin.dims, strict=True):
        if operation not in CONVERSIONS:
            raise UnsupportedError(f"transformers makes it by {operation}, which is not supported")
        try:
            parts = [CONVERSIONS[operation](parts, dim, origin, sizes)]
        except (RuntimeError, IndexError) as error:
            raise TensorMismatchError(f"{operation} along dimension {dim} does not fit them: {error}") from error
    return parts[0].contiguous()


def converted_shape(shapes: Sequence[Sequence[int]], origin: Origin, sizes: Sizes) -> tuple[int, ...]:
    """Return the shape of what `converted` makes of tensors of these shapes. Raises as it does."""
    return tuple(converted([torch.empty(shape, device="meta") for shape in shapes], origin, sizes).shape)


def sizes_of(origin: Origin, shapes: Mapping[str, Sequence[int]]) -> Sizes:
    """Return how long the parts of a split are, which only the model says; nothing for what is no split.

    shapes: of the model's parameters by name. Raises UnsupportedError where they lack one of the parts.
    """
    if "Split" not in origin.operations:
        return ()
    dim = origin.dims[origin.operations.index("Split")]
    found = [shapes.get(target, shapes.get(f"model.{target}")) for target in origin.targets]
    lacking = [target for target, shape in zip(origin.targets, found, strict=True) if shape is None]
    if lacking:
        raise UnsupportedError(f"the model has no {', '.join(lacking)}, whose size says where it is split")
    return [shape[dim] for shape in found if shape is not None]


def _concatenate(parts: Sequence[torch.Tensor], dim: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    return torch.cat(list(parts), dim)


def _stack(parts: Sequence[torch.Tensor], dim: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    return torch.stack(list(parts), dim)


def _transpose(parts: Sequence[torch.Tensor], dim: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    if parts[0].dim() != 2:
        raise IndexError(f"{parts[0].dim()} dimensions; only matrices are transposed")
    return parts[0].T


def _chunk(parts: Sequence[torch.Tensor], dim: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    if parts[0].shape[dim] % origin.count:
        raise IndexError(f"{parts[0].shape[dim]} are not divisible by {origin.count}")
    return parts[0].chunk(origin.count, dim)[origin.index]


def _split(parts: Sequence[torch.Tensor], dim: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    return torch.split_with_sizes(parts[0], list(sizes), dim)[origin.index]


def _interleave(parts: Sequence[torch.Tensor], dim: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    """Bring what stands in turn along `dim`, two and two, one half behind the other."""
    shape = list(parts[0].shape)
    pairs = parts[0].reshape([*shape[:dim], shape[dim] // 2, 2, *shape[dim + 1 :]])
    return pairs.transpose(dim, dim + 1).reshape(shape)


def _permute(parts: Sequence[torch.Tensor], num_heads: int, origin: Origin, sizes: Sizes) -> torch.Tensor:
    """Bring the rows of each head that are rotated together from pairs to one half behind the other."""
    if not num_heads:
        raise UnsupportedError("transformers makes it by PermuteForRope, and the config does not say how many heads")
    shape = parts[0].shape
    return parts[0].reshape(num_heads, shape[0] // num_heads // 2, 2, *shape[1:]).transpose(1, 2).reshape(shape)


CONVERSIONS: Mapping[str, Callable[[Sequence[torch.Tensor], int, Origin, Sizes], torch.Tensor]] = {
    "Concatenate": _concatenate,
    "MergeModulelist": _stack,
    "Transpose": _transpose,
    "Chunk": _chunk,
    "Split": _split,
    "Interleave": _interleave,
    "PermuteForRope": _permute,
}
"""By the name of the operation's class in transformers."""
