"""The bytes of weights that a step of a GGUF file's model reads: the bound of decoding."""

from __future__ import annotations

from dataclasses import dataclass

from ktransformers.errors import ConfigError
from ktransformers.weights.gguf.file import GGUFModel

__all__ = ["Weights", "shown_weights", "weights_of"]


@dataclass(frozen=True, slots=True)
class Weights:
    """The bytes of a file's weights: of what every step reads, and of one expert of one layer."""

    dense: int
    expert: int
    expert_layers: int
    vocab_size: int

    def per_step(self, touched: float) -> float:
        """Return the bytes that a step reads whose layers touch as many experts in the mean."""
        return self.dense + self.expert_layers * touched * self.expert


def weights_of(model: GGUFModel) -> Weights:
    """Count the bytes of weights by a file's headers.

    The embedding table is read row by row and does not count, unless it is the output's too.
    """
    dense = expert = 0
    layers = set()
    for name, tensor in model.tensors.items():
        if "_exps." in name:
            layers.add(name.split(".")[1])
            expert += tensor.nbytes // tensor.shape[0]
        elif name != "token_embd.weight" or "output.weight" not in model.tensors:
            dense += tensor.nbytes
    embedding = model.info("token_embd.weight")
    if embedding is None:
        raise ConfigError("the file has no token_embd.weight; pass a GGUF file of a whole model")
    return Weights(dense, expert // max(len(layers), 1), len(layers), embedding.shape[0])


def shown_weights(weights: Weights) -> str:
    """Return the bytes that a decode step reads as a line for people."""
    text = f"a step reads {weights.dense / 1e6:.1f} MB of dense weights"
    if weights.expert_layers:
        text += f" and {weights.expert / 1e6:.3f} MB per touched expert in {weights.expert_layers} layers"
    return text
